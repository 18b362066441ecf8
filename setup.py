"""Installs the package from the facts in settings.ini, the one place that states them."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

config = ConfigParser(delimiters=["="])
config.read("settings.ini", encoding="utf-8")
facts = config["DEFAULT"]

setup(
    name=facts["lib_name"],
    version=facts["version"],
    description=facts["description"],
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=facts["author"],
    author_email=facts["author_email"],
    url=facts["git_url"],
    keywords=facts["keywords"],
    license="Apache-2.0",
    packages=find_packages(include=["altgrad*"]),
    package_data={"altgrad": ["py.typed", "evidence/bench_1/*", "evidence/bench_1/*/*"]},
    python_requires=f">={facts['min_python']}",
    install_requires=facts["requirements"].split(),
    extras_require={
        extra: facts[f"{extra}_requirements"].split()
        for extra in ("dev", "bench", "ray", "workspace", "integrations", "explore", "triton")
    },
    entry_points={
        "console_scripts": facts["console_scripts"].split(),
        "nbdev": [f"{facts['lib_name']}={facts['lib_path']}._modidx:d"],
    },
    zip_safe=False,
)
