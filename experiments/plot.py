"""The command `fedjax-pfl plot`: `python -m experiments.plot --help` lists its flags."""

from fedjax_pfl.experiment import cli

if __name__ == "__main__":
    cli.main("plot")
