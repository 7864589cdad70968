"""Draw the pages' mermaid blocks as SVG, so that the site needs no network: `python docs/drawings.py mermaid.min.js`.

The file is mermaid's own (`npm pack mermaid`, package/dist/mermaid.min.js), and Chromium runs it. A drawing is found by
the digest of its block; a test fails when one is missing.
"""

import hashlib
import html
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
FOLDER = DOCS / "images" / "drawings"
BLOCK = re.compile(r"```mermaid\n(.*?)```", flags=re.DOTALL)
PAGE = """<!doctype html><meta charset="utf-8"><body><script src="{script}"></script><script>
mermaid.initialize({{startOnLoad: false, theme: "neutral", htmlLabels: false, flowchart: {{htmlLabels: false}}}});
(async () => {{
  const drawn = {{}};
  for (const [name, text] of Object.entries({blocks})) drawn[name] = (await mermaid.render("d" + name, text)).svg;
  document.body.innerHTML = "<pre id=drawn></pre>";
  document.getElementById("drawn").textContent = JSON.stringify(drawn);
}})();
</script>"""


def name_of(block: str) -> str:
    """The name of a block's drawing."""
    return hashlib.sha256(block.encode()).hexdigest()[:12]


def blocks() -> dict[str, str]:
    """Every page's blocks by the names of their drawings."""
    texts = (page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md")))
    return {name_of(block): block for text in texts for block in BLOCK.findall(text)}


def draw(script: Path) -> None:
    """Draw all blocks, and remove the drawings of blocks that are gone."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(PAGE.format(script=script.absolute().as_uri(), blocks=json.dumps(blocks())), encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
        command = ["chromium", *options, "--virtual-time-budget=20000", "--dump-dom", page.as_uri()]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    drawn = json.loads(html.unescape(re.findall(r'<pre id="drawn">(.*?)</pre>', shown, flags=re.DOTALL)[0]))
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file in FOLDER.glob("*.svg"):
        file.unlink()
    for name, svg in drawn.items():
        (FOLDER / f"{name}.svg").write_text(svg.replace("<br>", "<br/>") + "\n", encoding="utf-8")


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
