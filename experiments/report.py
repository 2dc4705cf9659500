"""The command `fedjax-pfl report`: `python -m experiments.report --help` lists its flags."""

from fedjax_pfl.experiment import cli

if __name__ == "__main__":
    cli.main("report")
