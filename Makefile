# Works with GNU make 3.81 and later. `make` alone lists the targets.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# Tests run with an empty home folder: they neither write to yours nor find a key or a cache there, and they stay offline.
# One thread each: two notebooks at a time with torch's default threads were over ten times slower on two busy cores (24 s against 280 s and more).
ISOLATED := env -u XDG_CACHE_HOME -u XDG_CONFIG_HOME -u XDG_DATA_HOME HOME="$(CURDIR)/.venv/home" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
PYTEST := $(ISOLATED) $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder
NBDEV_TEST := $(ISOLATED) $(BIN)/nbdev_test --n_workers 2 --timing --do_print

.DEFAULT_GOAL := help
.PHONY: help demo test test-all rest portable kills hostile verify referee replays bench gpu style house evidence lab export notebooks readme docs quarto

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

# .ci/first_light.py reads this line: what it measures and checks is what a newcomer runs.
DEMO := compare e7m0_fp8 e7m0_fp8:storage=grid_nearest e7m0_fp8:storage=grid_stochastic --seeds 3 \
  --set max_steps=150 --set batch_size=8 --set lr=1e-3 --set compute_dtype=float32
demo: $(INSTALLED) ## train with 8-bit weights, with and without an FP32 copy of them, and compare in runs/demo
	$(BIN)/altgrad $(DEMO) --out runs/demo

# `make rest` has these: the pages that are no floor, the floors above `training`, and those that
# tests/test_package.py runs with the built wheel, where there is no clone.
FLOORS := numbers|geometry|model|watching|training
ABOVE := evidence|views|studies|tutorials|understand
FROM_WHEEL := did_my_weights_move|what_broke_first|without_master_weights|train_what_you_serve

test: $(INSTALLED) ## lint, types, clean and exported notebooks, the notebooks up to training, the tests that are not slow: eight minutes
	@mkdir -p .venv/home
	@echo "== ruff: the code has no lint"
	@$(BIN)/ruff check -q --output-format concise --config .ci/ruff.toml altgrad tests setup.py .ci nbs/studies/experiments nbs/studies/benchmarks
	@$(BIN)/ruff check -q --output-format concise --config .ci/ruff-notebooks.toml nbs
	@echo "== mypy: annotations are right"
	@$(BIN)/mypy --config-file .ci/mypy.ini
	@echo "== nbdev_clean: the notebooks carry no needless metadata"
	@$(ISOLATED) $(BIN)/python .ci/notebooks.py check-clean
	@echo "== nbdev_export: altgrad/ is what the notebooks export"
	@$(ISOLATED) $(BIN)/python .ci/notebooks.py check-export
	@echo "== nbdev_test: the notebooks of basics, numbers, geometry, model, watching and training run"
	@$(NBDEV_TEST) --skip_folder_re '^[_.]|^($(ABOVE))$$' --skip_file_re '^[_.]|^(cli|index)\.ipynb$$'
	@echo "== pytest: tests/, without the slow ones"
	@$(PYTEST) -m "not slow" tests
	@echo "== passed. Left out, for \`make rest\` or \`make test-all\`: the other notebooks, slow cells and slow tests, and other CPUs"

test-all: test rest ## everything: make test, then make rest

rest: $(INSTALLED) ## what make test leaves out: the other notebooks, slow cells and tests, other CPUs' arithmetic: twenty minutes
	@mkdir -p .venv/home
	@echo "== nbdev_test: the other notebooks run, but for four that pytest runs from the wheel"
	@$(NBDEV_TEST) --skip_folder_re '^[_.]|^($(FLOORS))$$' --skip_file_re '^[_.]|^(basics|$(FROM_WHEEL))\.ipynb$$'
	@for page in $$(grep -rl '"#| *slow' $(addprefix nbs/,$(subst |, ,$(FLOORS)))); do $(NBDEV_TEST) --flags slow --path $$page || exit 1; done
	@echo "== pytest: the slow tests"
	@$(PYTEST) -m slow tests
	@echo "== portable: what holds numerics, in the two settings that differ most"
	@$(ISOLATED) $(BIN)/python .ci/portable.py --quick

portable: $(INSTALLED) ## the notebooks and tests whose numbers pass through sums, computed as other machines would (an hour)
	@mkdir -p .venv/home
	@$(ISOLATED) $(BIN)/python .ci/portable.py $(PORTABLE)

verify: $(INSTALLED) ## quantize all 2^32 float32 patterns in every 8-bit and OCP format, and compare every bit (resumable)
	@OMP_NUM_THREADS=1 $(BIN)/python .ci/verify.py

referee: $(INSTALLED) ## compare the Triton kernels with the CPU path under Triton's interpreter, on all boundaries of every format (two minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python .ci/referee.py

replays: $(INSTALLED) ## make thirty stored rows again, drawn by chance from every ledger, and compare (eight minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python .ci/replays.py

kills: $(INSTALLED) ## kill runs of every format before each of their file operations and at random moments (long)
	@$(ISOLATED) $(BIN)/python .ci/kills.py

hostile: $(INSTALLED) ## thousands of generated hostile inputs: each must be refused in one line, and each control must work (a quarter of an hour)
	@mkdir -p .venv/home
	@$(ISOLATED) $(BIN)/python .ci/hostile.py

# The first paragraph of a script says what it measures and about how long. With ROUNDS=2 all is quick and for a look:
# results go to runs/bench, and the stored ones do not change.
ABOUT := import ast, sys; print(ast.get_docstring(ast.parse(open(sys.argv[1], encoding="utf-8").read())).split("\n\n")[0])
bench: $(INSTALLED) ## time the code against other libraries (two hours; a look: ROUNDS=2); libraries in folders of their own: PEERS=FOLDER
	@$(if $(ROUNDS),mkdir -p runs/bench)
	@for script in nbs/studies/benchmarks/bench_*.py; do \
	  echo "== $$script"; $(BIN)/python -c '$(ABOUT)' $$script; \
	  $(BIN)/python $$script $(if $(ROUNDS),--rounds $(ROUNDS) --out runs/bench/$$(basename $$script .py).json) || exit 1; \
	done

# make gpu DEVICE=cpu BUDGET=3m is a dry run, far smaller, into runs/gpu.
DEVICE ?= cuda
BUDGET ?= 40m
gpu: $(INSTALLED) ## on a machine with a GPU: all that was written for one, in order of worth, within BUDGET=40m (resumable)
	@$(BIN)/python nbs/studies/benchmarks/gpu.py --device "$(DEVICE)" --budget "$(BUDGET)"

style: $(INSTALLED) ## measure how the code reads, beside what is wanted
	@$(BIN)/python .ci/style.py

house: $(INSTALLED) ## draw the floors and who imports whom, nbs/images/house.svg
	@$(BIN)/python .ci/house.py

# Nothing is trained: the pages read nbs/results (.ci/ledger.py writes what a sweep's own ledger says).
EVIDENCE := first_storage failure_atlas dashboard better_rule loss_against_bits narrow_formats other_reasons \
    other_rules second_task sizes ten_million bridge the_answer
evidence: $(INSTALLED) ## rebuild every table and figure of the studies from the stored rows (some minutes)
	@$(ISOLATED) $(BIN)/python .ci/notebooks.py execute $(EVIDENCE:%=nbs/studies/%.ipynb)
	@$(BIN)/python .ci/answer.py
	@$(BIN)/python .ci/summary.py
	@$(ISOLATED) $(BIN)/python .ci/notebooks.py execute nbs/index.ipynb
	@$(BIN)/python .ci/notebooks.py readme

lab: $(INSTALLED) ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab nbs

export: $(INSTALLED) ## write altgrad/ from the notebooks, and clean the notebooks
	$(BIN)/nbdev_export
	$(BIN)/nbdev_clean

notebooks: export ## run every notebook again and keep the outputs (a quarter of an hour; one thread, because the last digits depend on their number)
	OMP_NUM_THREADS=1 $(BIN)/python .ci/notebooks.py execute

readme: $(INSTALLED) ## write README.md from nbs/index.ipynb
	$(BIN)/python .ci/notebooks.py readme

# nbdev_docs renders a README of its own where README.md is older than index.ipynb, hence the touch.
docs: quarto $(INSTALLED) ## build the web site in _docs (needs Quarto)
	@touch README.md
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/nbdev_docs
	$(BIN)/python .ci/offline.py _docs

quarto:
	@command -v quarto >/dev/null || { echo "make docs needs Quarto: https://quarto.org/docs/get-started" >&2; exit 2; }

# The stamp is written last, so an interrupted install is done again.
$(INSTALLED): settings.ini setup.py constraints.txt
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "AltGrad needs Python 3.11 or newer, but $(PYTHON) is: $$($(PYTHON) --version 2>&1 | tail -n 1). Try make PYTHON=python3.12" >&2; \
	    exit 1; }; \
	  $(PYTHON) -m venv --clear .venv; }
	@echo "Installing AltGrad and its packages into .venv; the first time takes minutes (torch is large)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --use-pep517 -c constraints.txt -e '.[dev]'
	@touch $@
