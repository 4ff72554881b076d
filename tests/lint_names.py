"""No public class name stands for two things in the package; run by ``make lint``."""

import ast
import sys
from collections import defaultdict
from pathlib import Path

SOURCE = Path("src/ridgeline")


def public_classes(source: Path) -> dict[str, list[str]]:
    """Where each public class of a package is defined, by name."""
    found = defaultdict(list)
    for path in sorted(source.rglob("*.py")):
        where = str(path.relative_to(source))
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(where)
    return found


def main() -> int:
    """Print the names that stand for two things; 1 if there are any."""
    doubles = {name: where for name, where in public_classes(SOURCE).items() if len(where) > 1}
    for name, where in sorted(doubles.items()):
        print(f"{name} is defined in {' and in '.join(where)}: one name, one thing")
    return 1 if doubles else 0


if __name__ == "__main__":
    sys.exit(main())
