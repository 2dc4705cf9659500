"""Writes all files to a folder, and TABLE.md beside this script."""

import sys
from pathlib import Path

from tests import data_in

if __name__ == "__main__":
    for case in data_in.cases():
        case.write(Path(sys.argv[1]))
    Path(__file__).with_name("TABLE.md").write_text(data_in.table())
