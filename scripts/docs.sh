#!/usr/bin/env bash
# Builds the documentation site in build/site. Open build/site/index.html.
#
#   scripts/docs.sh              builds it
#   scripts/docs.sh --strict     also fails at a warning, such as a link or an anchor that does not exist
#   scripts/docs.sh --serve      builds it and shows it at http://127.0.0.1:8000; run it again after a change
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
.venv/bin/python scripts/docs_pages.py build/docs
# A notice of the theme about another program's next version.
export NO_MKDOCS_2_WARNING=1
if [ "${1:-}" = --serve ]; then
    exec .venv/bin/mkdocs serve --config-file docs/mkdocs.yml --dev-addr 127.0.0.1:8000
fi
exec .venv/bin/mkdocs build --quiet --clean --config-file docs/mkdocs.yml "$@"
