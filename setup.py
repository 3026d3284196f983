"""Hand the facts of settings.ini to setuptools. No fact is stated here."""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
ini = ConfigParser(delimiters=["="], interpolation=None)
if not ini.read(here / "settings.ini", encoding="utf-8"):
    raise SystemExit("setup.py needs settings.ini beside it.")
facts = ini["DEFAULT"]
extras = {
    key.removesuffix("_requirements"): value.split()
    for key, value in facts.items()
    if key.endswith("_requirements")
}

readme = (here / "README.md").read_text(encoding="utf-8")
urls = (here / "pyproject.toml").read_text(encoding="utf-8")
home = re.search(r'^Repository = "(.*)"', urls, re.M)[1]
for kind, address in (("!", f"{home}/raw/main/"), ("", f"{home}/blob/main/")):
    # the page of the package index has no files beside it: links there need the whole address
    readme = re.sub(rf"((?<!!){re.escape(kind)}\[[^]]*\]\()(?!https?:|#)", rf"\1{address}", readme)

setup(
    version=facts["version"],
    description=facts["description"],
    long_description=readme,
    long_description_content_type="text/markdown",
    author=facts["author"],
    author_email=facts["author_email"],
    license=facts["license"],
    keywords=facts["keywords"].split(),
    classifiers=facts["classifiers"].strip().splitlines(),
    python_requires=">=" + facts["min_python"],
    install_requires=facts["requirements"].split(),
    extras_require=extras,
    packages=[*find_packages(include=["cramnb", "cramnb.*"]), "cramnb.data"],
    # one copy in the repository; chapters read it from the wheel
    package_dir={"cramnb.data": "nbs/data"},
    package_data={"cramnb.data": ["*.json", "*.safetensors"]},
    entry_points={
        "console_scripts": facts["console_scripts"].split(),
        # links from prose to the pages of functions
        "nbdev": ["cramnb=cramnb._modidx:d"],
    },
)
