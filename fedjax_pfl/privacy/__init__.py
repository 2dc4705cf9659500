"""What protects or attacks uploads."""
