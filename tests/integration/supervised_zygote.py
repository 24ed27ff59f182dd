"""A pretended engine zygote: the protocol of shared/engine/zygote.py, forking HTTP dummies, without vLLM."""

import argparse
import sys

import shared.engine.zygote as zygote


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    args = parser.parse_args()
    zygote.PRELOAD = ()
    zygote.check_version = lambda: "none"
    return zygote.main(["--socket", args.socket])


if __name__ == "__main__":
    sys.exit(main())
