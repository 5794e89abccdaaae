PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.foveate-ready
OUT := out/demo

.PHONY: demo test format clean

demo: $(READY)
	$(BIN)/foveate demo --out $(OUT)
	@echo "Open $(OUT)/report.html"

test: export OMP_NUM_THREADS := 1
test: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q -n 2

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf out dist .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# The environment is made once, and again when what it is made from has changed. It may be a
# link that several checkouts share; then it is ready for the checkout that was installed last.
ifneq ($(shell cat $(READY) 2>/dev/null),$(CURDIR))
.PHONY: $(READY)
endif
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@echo "$(CURDIR)" > $@
