"""`python -m bench [CASE …] [rounds=5] [out=bench.json] [key=value …]`, from the top folder.

bench/README.md has the command of each log in nbs/data."""

import sys

from cramnb.core import CramError

from .cases import bench

words = [w for w in sys.argv[1:] if not w.startswith("out=")]
out = next((w[4:] for w in sys.argv[1:] if w.startswith("out=")), "bench.json")
try:
    bench(words, out)
except (CramError, OSError) as error:
    sys.exit(f"bench: {error}")
