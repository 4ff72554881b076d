"""Hooks of mkdocs (`make docs`): pages that are made, and links that leave the folder."""

import io
import os
import posixpath
import re
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from ridgeline.cli.main import COMMANDS, main

_ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!\w+:|#)([^)#]*)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The README as the first page, and every command's help."""
    home = _relinked((_ROOT / "README.md").read_text(), folder="")
    files.append(File.generated(config, "index.md", content=home))
    files.append(File.generated(config, "reference/command-line.md", content=_command_line()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Of links to files beside the documentation, the text and the path."""
    if page.file.generated_by is not None:
        return markdown
    return _relinked(markdown, folder=posixpath.join("docs", posixpath.dirname(page.file.src_uri)))


def _relinked(markdown: str, folder: str) -> str:
    """``folder`` of the repository has the file; pages of ``docs`` lie where they did, and what
    lay elsewhere at the top."""

    def link_or_path(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        if not path.startswith("docs/"):
            return f"{link[1]} (`{path}`)"
        page = path if posixpath.splitext(path)[1] else f"{path}/README.md"
        return f"[{link[1]}]({posixpath.relpath(page, folder or 'docs')}{link[3] or ''})"

    return _LINK.sub(link_or_path, markdown)


def _command_line() -> str:
    os.environ["COLUMNS"] = "96"
    pages = ["# Command line", "What `--help-all` says, or `--help` where that is all."]
    for command in COMMANDS:
        name = command.replace("bench-", "bench ")
        pages.append(f"## {name}\n\n```text\n{_help_of(command)}```")
    return "\n\n".join(pages)


def _help_of(command: str) -> str:
    for option in ("--help-all", "--help"):
        text = io.StringIO()
        with suppress(SystemExit), redirect_stdout(text), redirect_stderr(io.StringIO()):
            main([command, option])
        if text.getvalue():
            return text.getvalue()
    raise AssertionError(command)
