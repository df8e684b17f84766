import argparse


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Takes underscores in place of hyphens in names."""

    def parse_args(self, args=None, namespace=None):
        args = [arg.replace("_", "-") if arg.startswith("--") and "=" not in arg else arg for arg in args]
        return super().parse_args(args, namespace)
