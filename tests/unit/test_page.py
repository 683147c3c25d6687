"""The files of the page: what is served, under which policy, and that they need nothing from elsewhere."""

import asyncio
import re
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from orchestrator.serve import page

FOLDER = Path(page.__file__).parent
SOURCES = {path.name: path.read_text() for path in FOLDER.iterdir() if path.suffix in (".html", ".css", ".js", ".svg")}


async def _get(path: str) -> httpx.Response:
    transport = httpx.ASGITransport(Starlette(routes=page.routes()))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.get(path)


def get(path: str) -> httpx.Response:
    return asyncio.run(_get(path))


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_each_file_is_served_under_the_policy(name: str) -> None:
    response = get("/" if name == page.INDEX else f"/static/{name}")
    assert response.status_code == 200
    assert response.text == SOURCES[name]
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/static/", "/static/index.html", "/static/__init__.py", "/static/../page/app.js"])
def test_nothing_else_is(path: str) -> None:
    assert get(path).status_code == 404


def test_it_needs_nothing_from_elsewhere() -> None:
    index, scripts = SOURCES[page.INDEX], {name: text for name, text in SOURCES.items() if name.endswith(".js")}
    needed = set(re.findall(r'(?:src|href)="static/([^"]+)"', index))
    needed |= {name for text in scripts.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert needed == set(page.FILES)
    assert not re.search(r'(?:src|href|action)="(?!static/)|\sstyle="|\son\w+="|<script>|<style', index)
    assert not [name for name in SOURCES if re.search(r"url\((?!#)|@import", SOURCES[name])]
    assert sum(len(text) for text in SOURCES.values()) < 64_000


def test_texts_are_never_html() -> None:
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser"
    assert not [name for name, text in SOURCES.items() if re.search(sinks, text)]
