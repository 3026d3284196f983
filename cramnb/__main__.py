"""python -m cramnb"""
import sys

from .cram import main

if __name__ == "__main__": sys.exit(main())
