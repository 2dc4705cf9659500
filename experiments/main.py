"""The command `fedjax-pfl run`: `python -m experiments.main --help` lists its flags."""

from fedjax_pfl.experiment import cli

if __name__ == "__main__":
    cli.main("run")
