"""Recipes find those beside them, as when they are run as scripts."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples" / "trainers"))
