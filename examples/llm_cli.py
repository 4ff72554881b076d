"""The `llm` command: pip install llm; python llm_cli.py [URL].

It writes the same file that you would put into the folder that `llm logs path` names.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
MODELS = f"""\
- model_id: ridgeline
  model_name: embedded
  api_base: {url}/v1
"""
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "extra-openai-models.yaml").write_text(MODELS)
    command = [sys.executable, "-m", "llm", "-m", "ridgeline", "-o", "max_tokens", "48"]
    done = subprocess.run(
        [*command, "What does str.join do?"],
        env={**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"},
        check=False,
    )
sys.exit(done.returncode)
