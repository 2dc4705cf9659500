"""The command `fedjax-pfl predict`; `--help` lists its flags."""

from fedjax_pfl.experiment import cli

if __name__ == "__main__":
    cli.main("predict")
