"""Write the vectors: python -m tests.qtensor.vectors write."""

import sys

from tests.qtensor.vectors.files import FOLDER, SCHEMES, contents

if sys.argv[1:] != ["write"]:
    sys.exit(__doc__)
for old in FOLDER.glob("*.safetensors"):
    old.unlink()
for name in SCHEMES:
    (FOLDER / f"{name}.safetensors").write_bytes(contents(name))
    print(f"{name}: {len(contents(name)) / 1e3:.1f} KB")
print(f"{sum(len(contents(name)) for name in SCHEMES) / 1e3:.0f} KB in all")
