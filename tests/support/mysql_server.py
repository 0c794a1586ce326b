"""Fetches a MySQL server, which only Debian's unstable distribution has.

Run it with `python -m tests.support.mysql_server DIRECTORY`.

The packages and all their dependencies, including the C library, are unpacked into the directory and not installed. The
output is the path of a program ``mysqld`` that runs with those libraries.
"""

from __future__ import annotations

import hashlib
import lzma
import subprocess
import sys
import urllib.request
from pathlib import Path

MIRROR = "http://deb.debian.org/debian"
INDEX = f"{MIRROR}/dists/sid/main/binary-amd64/Packages.xz"
SERVER = "mysql-server-core"
LEFT_OUT = frozenset({"perl", "debconf"})
PROGRAM = """\
#!/bin/sh
# The first option stays first: --no-defaults has to.
root={root}
libraries=$root/usr/lib/x86_64-linux-gnu
first=$1
shift
exec $libraries/ld-linux-x86-64.so.2 --library-path $libraries:$root/usr/lib/mysql/private $root/usr/sbin/mysqld \\
    "$first" --basedir=$root/usr --lc-messages-dir=$root/usr/share/mysql "$@"
"""


def fetch(directory: Path) -> Path:
    """Fetch all missing files, and return the path of the program."""
    program = directory / "mysqld"
    if program.exists():
        return program
    directory.mkdir(parents=True, exist_ok=True)
    root = directory / "root"
    for package in needed(index(), SERVER):
        data = read(f"{MIRROR}/{package['Filename']}")
        if hashlib.sha256(data).hexdigest() != package["SHA256"]:
            raise SystemExit(f"{package['Filename']} is not what the index says; fetch again.")
        file = directory / "package.deb"
        file.write_bytes(data)
        subprocess.run(["dpkg-deb", "-x", file, root], check=True)
        file.unlink()
    program.write_text(PROGRAM.format(root=root), encoding="utf-8")
    program.chmod(0o755)
    return program


def index() -> dict[str, dict[str, str]]:
    """Return all packages by name, and by the names that they provide."""
    packages: dict[str, dict[str, str]] = {}
    provided: dict[str, dict[str, str]] = {}
    for paragraph in lzma.decompress(read(INDEX)).decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and line[0] != " ")
        if "Package" in fields:
            packages[fields["Package"]] = fields
            for name in names(fields.get("Provides", "")):
                provided.setdefault(name, fields)
    return {**provided, **packages}


def needed(packages: dict[str, dict[str, str]], name: str) -> list[dict[str, str]]:
    """Return a package with all its dependencies."""
    found: dict[str, dict[str, str]] = {}
    wanted = [name]
    while wanted:
        package = packages.get(wanted.pop(), {})
        label = package.get("Package", "")
        if label and label not in found and label not in LEFT_OUT:
            found[label] = package
            wanted += names(package.get("Depends", ""))
    return list(found.values())


def names(relations: str) -> list[str]:
    """Return the names in a field such as ``libc6 (>= 2.38), perl:any | other``, using the first alternative."""
    firsts = (each.split("|")[0].split() for each in relations.split(","))
    return [first[0].partition(":")[0] for first in firsts if first]


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return bytes(answer.read())


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1]).resolve()))
