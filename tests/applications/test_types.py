"""What pyright, strict, says of the example applications: nothing. mypy looks at them with all the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = [ROOT / "tests/examples" / f"{name}.py" for name in ("events", "booking", "shop", "indexer")]


def test_pyright_finds_nothing_in_the_applications(tmp_path: Path) -> None:
    config = {"typeCheckingMode": "strict", "include": [str(path) for path in PROGRAMS], "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(PROGRAMS), done.stderr
    found = [(one["file"], one["range"]["start"]["line"] + 1, one["message"]) for one in report["generalDiagnostics"]]
    assert found == []
