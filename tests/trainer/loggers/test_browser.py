"""TensorBoard as a person sees it: opened in a real browser."""

import importlib.util
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from seen import SHORT

from evener.trainer import compose, train

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium: apt-get install chromium"),
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None, reason="playwright is not installed; pip install playwright"
    ),
]

WAIT_MS = 60_000


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A TensorBoard that shows one short run on one device."""
    logs = tmp_path_factory.mktemp("logs")
    options = ["test_after_fit=true", "trainer.max_epochs=2"]
    train(compose([*SHORT, f"log_dir={logs}", *options, "callbacks=histograms"]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logs), "--port", str(port)]
    server = subprocess.Popen([*command, "--load_fast=false"], stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(scope="module")
def page(address: str) -> Iterator[Any]:
    """A page of a browser that has opened TensorBoard, which may take some seconds to start."""
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        deadline = time.monotonic() + 60
        while True:
            try:
                page.goto(address)
                break
            except Error:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        yield page
        browser.close()


def opened(page: Any, address: str, tab: str, text: str) -> None:
    """Open a tab, and wait until it shows a text."""
    page.goto(f"{address}/#{tab}")
    page.reload()
    page.get_by_text(text).first.wait_for(timeout=WAIT_MS)


def lines(card: Any) -> list[str]:
    """The colours of a chart's lines, once it has drawn them."""
    card.scroll_into_view_if_needed()
    card.locator("path.line").first.wait_for(state="attached", timeout=WAIT_MS)
    return card.locator("path.line").evaluate_all("paths => paths.map(path => getComputedStyle(path).stroke)")


def test_every_chart_is_of_something_logged(page: Any, address: str) -> None:
    opened(page, address, "custom_scalars", "loss")
    for title in ("loss", "metrics", "monitored: val/loss"):
        assert page.get_by_text(title, exact=True).count(), title
    assert not page.get_by_text("share of the batch").count()
    open_ones = page.locator("tf-custom-scalar-multi-line-chart-card").all()[:5]  # of the first two categories
    assert all(lines(card) for card in open_ones)


def test_hparams_show_the_strategys_word(page: Any, address: str) -> None:
    opened(page, address, "hparams", "single_device")
    assert page.get_by_text("strategy", exact=True).count()


@pytest.mark.parametrize(("tab", "text"), [("images", "classified"), ("histograms", "weights"), ("text", "config")])
def test_a_tab_shows(page: Any, address: str, tab: str, text: str) -> None:
    opened(page, address, tab, text)
