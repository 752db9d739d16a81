"""The public face of the library as text: every visible item with its signatures, fields, variants
and traits, as rustdoc shows them. Hidden items are no part of it.

    python3 .ci/public_face.py           build the documentation and compare; CI does
    python3 .ci/public_face.py --write   write the new face to tests/repository/public-face.txt

It reads rustdoc's pages, because they show re-exported items of sidelane-core in their place and
come from a stable toolchain. A new version of rustdoc may write them otherwise: then the face
changes, or nothing is found, and the comparison says so.
"""

import difflib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FACE = ROOT / "tests/repository/public-face.txt"
PAGES = ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "doc/sidelane"
MEMBERS = {"method", "associatedconstant", "associatedtype"}
VOID = {"br", "col", "hr", "img", "input", "link", "meta", "wbr"}


def clean(code):
    """Code on one line."""
    code = " ".join(code.replace("ⓘ", " ").split())
    for ugly, nice in [("( ", "("), (", )", ")"), ("< ", "<"), (", >", ">")]:
        code = code.replace(ugly, nice)
    return code.rstrip(",")


class Page(HTMLParser):
    """Declaration, members and traits of the item of a page."""

    def __init__(self, text):
        super().__init__()
        self.open = []  # (tag, id or None, classes) of the elements around the current place
        self.code = None  # text of the code that is being read, and depth at which it ends
        self.declaration, self.members, self.traits = "", [], []
        self.feed(text)

    def inside(self, name):
        return any(id == name for _, id, _ in self.open)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag in VOID:
            return
        if self.code and tag == "div":
            self.code = (self.code[0] + " ", self.code[1])
        self.open.append((tag, attributes.get("id"), set((attributes.get("class") or "").split())))
        classes = self.open[-1][2]
        if self.code is None and classes & {"item-decl", "code-header"}:
            self.code = ("", len(self.open))

    def handle_endtag(self, tag):
        if self.code and self.code[1] == len(self.open):
            self.take(self.code[0])
            self.code = None
        if tag not in VOID:
            _, _, classes = self.open.pop()
            if self.code and "code-attribute" in classes:
                self.code = (self.code[0] + "\n", self.code[1])

    def handle_data(self, text):
        # What unfolds a long declaration is no part of it.
        if self.code and not any(tag == "summary" and "hideme" in classes for tag, _, classes in self.open):
            self.code = (self.code[0] + text, self.code[1])

    def take(self, code):
        classes = self.open[-1][2]
        section = next((classes for tag, _, classes in reversed(self.open) if tag == "section"), set())
        if "item-decl" in classes:
            # An alias also shows what it stands for.
            self.declaration = self.declaration or code
        elif section & MEMBERS and self.inside("implementations-list"):
            self.members.append(clean(code))
        elif "impl" in section and self.inside("trait-implementations-list"):
            self.traits.append(clean(code))
        elif "impl" in section and self.inside("synthetic-implementations-list"):
            self.traits += [clean(code)] if re.search(r"!(Send|Sync) for", code) else []


def items():
    """Name and page of every item."""
    listed = (PAGES / "all.html").read_text()
    for page, name in re.findall(r'<a href="([^"#]+\.html)">([A-Za-z_:0-9]+)</a></li>', listed):
        yield name, PAGES / page


def declaration(text):
    """The lines of a declaration, without those that say nothing."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    lines = [line.lstrip() if line.lstrip().startswith("#[") else line for line in lines]
    return [line for line in lines if not line.lstrip().startswith("//")]


def face():
    lines = []
    for name, path in sorted(items()):
        page = Page(path.read_text())
        assert page.declaration, f"{path}: rustdoc writes its pages otherwise"
        lines += ["", f"## {name}"] + declaration(page.declaration)
        lines += [f"    {member}" for member in page.members]
        traits = [of for of in sorted(page.traits) if not of.startswith("impl StructuralPartialEq")]
        plain = re.compile(rf"impl (!?\w+) for {name.split('::')[-1]}")
        short = [found[1] for found in map(plain.fullmatch, traits) if found]
        lines += [f"    {of}" for of in traits if not plain.fullmatch(of)]
        lines += [f"    impl {' + '.join(short)}"] if short else []
    return lines[1:]


def main():
    write = sys.argv[1:] == ["--write"]
    flags = {"RUSTDOCFLAGS": "-D warnings"}
    subprocess.run(["cargo", "doc", "--no-deps"], cwd=ROOT, env=os.environ | flags, check=True)
    new = "\n".join(face()) + "\n"
    if write:
        FACE.write_text(new)
    elif new != FACE.read_text():
        diff = difflib.unified_diff(FACE.read_text().splitlines(), new.splitlines(), "tree", "code", lineterm="", n=1)
        print("\n".join(diff))
        sys.exit("the public face has changed: if that is meant, python3 .ci/public_face.py --write")


if __name__ == "__main__":
    main()
