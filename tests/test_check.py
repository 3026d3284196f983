"""The checker finds what does not work in a reader's own file, and says it in one line."""

import ast
import inspect
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cramnb import mini
from cramnb.book.check import asked, check, judge, write_new
from cramnb.cli import main

NAMES = [name for names in asked().values() for name in names]
FUNCTIONS = [name for name in NAMES if inspect.isfunction(getattr(mini, name))]
CLASSES = [name for name in NAMES if inspect.isclass(getattr(mini, name))]
SOURCE = Path(mini.__file__).read_text(encoding="utf-8")


def told(name: str, definition) -> str:
    "What the judge says of mini with one definition in place of its own."
    my = {n: getattr(mini, n) for n in NAMES} | {name: definition}
    return judge(SimpleNamespace(**my), name)


def spoilt(value, how):
    "The same with numbers how(x) in place of x."
    if isinstance(value, torch.Tensor | np.ndarray | float | int):
        return how(value)
    if isinstance(value, tuple | list):
        return type(value)(spoilt(x, how) for x in value)
    return value[:0] if isinstance(value, str) else None


def zeros(x):
    return x * 0


def nan(x):
    floating = isinstance(x, torch.Tensor) and x.is_floating_point()
    return x * math.nan if floating or isinstance(x, float) else x * 0


def nothing(x):
    return None


def ignoring(function, parameter):
    "It takes the first value that it ever saw, or the default, whatever it is given."
    signature, seen = inspect.signature(function), {}
    default = signature.parameters[parameter].default

    def call(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        value = bound.arguments[parameter] if default is inspect.Parameter.empty else default
        bound.arguments[parameter] = seen.setdefault(parameter, value)
        return function(*bound.args, **bound.kwargs)

    return call
