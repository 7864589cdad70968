"""Run the process of one trial: `python -m evener.trainer.compare.trial_process <config>`. Do not import it."""

import json
import sys
from pathlib import Path

from ...strategies.distributed.process_exit import die_with_parent
from .trial import OUTCOME_FILE, run_here

if __name__ == "__main__":
    die_with_parent()
    given = Path(sys.argv[1])
    given.with_name(OUTCOME_FILE).write_text(json.dumps(run_here(given)), encoding="utf-8")
