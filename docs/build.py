#!/usr/bin/env python3
"""Build the documentation site with mdBook, check its links, and print the site's folder.

The pages link to each other, to the README and to files of config/ and deploy/ as they lie in the repository, so that
they can be read there too. The site has the same layout, so the same links work.

$MDBOOK names an mdbook; otherwise one on PATH, or in target/tools, is used if it has the pinned version. Else it is
installed there by cargo, once.

Exit code 1, with one line for each broken link on standard error, when there are any.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

VERSION = "0.5.4"
ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "target"
# What the site is made of.
PAGES = ["README.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "docs", "deploy", "config"]


def mdbook():
    """The path of an mdbook of the pinned version."""
    installed = TARGET / "tools/bin/mdbook"
    for candidate in (os.environ.get("MDBOOK"), shutil.which("mdbook"), installed):
        if candidate and Path(candidate).exists():
            said = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=False).stdout
            if said.strip() == f"mdbook v{VERSION}":
                return candidate
    # Without the server and the watcher, which are more than half of it.
    command = ["cargo", "install", "--locked", "--root", TARGET / "tools", "--no-default-features", "--features", "search"]
    subprocess.run([*command, f"mdbook@{VERSION}"], check=True, stdout=sys.stderr)
    return installed


def lay_out(book):
    """Put the sources where mdBook finds them: the chapters of docs/SUMMARY.md, from the repository's root."""
    shutil.rmtree(book, ignore_errors=True)
    source = book / "src"
    for name in PAGES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        source.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, source / name)
    summary = (source / "docs/SUMMARY.md").read_text(encoding="utf-8")
    summary = re.sub(r"\]\((?!\.\./)", "](docs/", summary).replace("](../", "](")
    (source / "SUMMARY.md").write_text(summary, encoding="utf-8")
    (source / "docs/SUMMARY.md").unlink()
    (source / "docs/book.toml").rename(book / "book.toml")


def list_folders(site):
    """Give each folder of files that pages link to a page that lists them."""
    for folder in [*site.glob("config/**/"), *site.glob("deploy/**/")]:
        names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir() if entry.name != "index.html")
        items = "".join(f'<li><a href="{quote(name)}{"index.html" * name.endswith("/")}">{escape(name)}</a>' for name in names)
        title = escape(str(folder.relative_to(site)))
        text = f"<!doctype html><meta charset=utf-8><meta name=viewport content='width=device-width'><title>{title}</title><h1>{title}</h1><ul>{items}</ul>"
        (folder / "index.html").write_text(text, encoding="utf-8")


def list_for_models(site):
    """Write llms.txt (llmstxt.org): the chapters, for programs that read the documentation."""
    # Python 3.10 and earlier read no TOML.
    book = dict(re.findall(r'^(title|description) = "(.*)"$', (ROOT / "docs/book.toml").read_text(encoding="utf-8"), re.M))
    lines = [f"# {book['title']}", "", f"> {book['description']}"]
    for line in (ROOT / "docs/SUMMARY.md").read_text(encoding="utf-8").splitlines():
        chapter = re.fullmatch(r"- \[(.+)\]\((.+)\.md\)", line)
        if line.startswith("# ") and line != "# Summary":
            lines += ["", f"#{line}", ""]
        elif chapter:
            page = os.path.normpath(f"docs/{chapter[2]}.html")
            lines.append(f"- [{chapter[1]}]({page})")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


class Page(HTMLParser):
    """The ids that a page has, and the places that it leads to."""

    def __init__(self, file):
        super().__init__()
        self.ids, self.links = set(), []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids.update(attrs[name] for name in ("id", "name") if attrs.get(name))
        if tag in ("a", "img", "link", "script"):
            self.links.extend(attrs[name] for name in ("href", "src") if attrs.get(name))


def broken(site):
    """Each link that leads nowhere within the site. Links to other sites are not followed."""
    pages = {file: Page(file) for file in sorted(site.rglob("*.html"))}
    for file, page in pages.items():
        # Its links are those of the root, whatever the address that was not found; print.html repeats all pages.
        if file.name in ("404.html", "print.html", "toc.html"):
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            there = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if there.is_dir():
                there /= "index.html"
            if not there.is_file():
                yield f"{file.relative_to(site)}: {link}: there is no such file"
            elif parts.fragment and there in pages and unquote(parts.fragment) not in pages[there].ids:
                yield f"{file.relative_to(site)}: {link}: the page has no such heading"


def main():
    described = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=described).parse_args()
    book = TARGET / "book"
    program = mdbook()
    lay_out(book)
    subprocess.run([program, "build", book], check=True, stdout=sys.stderr)
    site = book / "book"
    list_folders(site)
    list_for_models(site)
    found = list(broken(site))
    for line in found:
        print(line, file=sys.stderr)
    if not found:
        print(site)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
