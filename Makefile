# The commands of a contributor. They need Python 3.11 with venv, git, make and a C compiler. .venv is made on first use, and
# updated when pyproject.toml or a C file changes.

PYTHON ?= python3.11
PYTEST_ARGS ?=
BIN := .venv/bin
CODE := $(wildcard trio_rollout compat tests examples benchmarks hatch_build.py .ci/ci.py docs/make_pictures.py)
COMPILED := hatch_build.py $(wildcard trio_rollout/sglang/_wire/*.[ch])

.PHONY: setup demo test soak bench bench-full mutate test-kill check pictures format setup-sglang test-sglang setup-agents test-agents setup-ray test-ray

setup: .venv/.installed

.venv/.installed: pyproject.toml $(COMPILED)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[test,check]'
	touch $@

demo: setup
	$(BIN)/python examples/tiny_rl.py --out runs/demo

# Two processes: 12 minutes on two cores. Half of that is a sweep of 300 whole engines and 4,000 cancel points. The sweep
# prints the states that it met, and fails if it never met one of the interesting ones.
test: setup
	$(BIN)/pytest -n 2 --dist worksteal $(PYTEST_ARGS)

# The long versions: SEEDS whole engines, a million groups, a million sessions. For half an hour on real sockets, run
# $(BIN)/python tests/soak/failing_servers.py --minutes 30
SEEDS ?= 2000
soak: setup
	SEEDS=$(SEEDS) $(BIN)/pytest -n 2 --dist worksteal -m 'soak or seeds' $(PYTEST_ARGS)

# Each patch of tests/mutations breaks one rule; the tests named in it must fail (four minutes).
mutate: setup
	$(BIN)/python tests/mutations/run.py

# Engines with a ledger, killed at 200 random moments and checked after each (two minutes). To kill `trio-rollout run` every
# 5 to 15 s until a file is finished (20 minutes), run $(BIN)/python -m tests.kill.kill_run
test-kill: setup
	$(BIN)/python -m tests.kill --cycles 200

# flake8-async takes a third of a second for each file, so it checks only files with async code, several at once.
# ASYNC114 wants a list of every function used with nursery.start; it helps only in hand-written __aenter__ methods, and there
# are none. ASYNC910 to 912 demand a checkpoint on every path. A port whose simple version returns at once (no ledger,
# no reward) and a hot path that must not yield have none by design, and Trio itself fails these rules.
FLAKE8_ASYNC := git grep -l async -- 'trio_rollout/*.py' 'compat/*.py' 'examples/*.py' \
	| xargs -P 4 -n 12 $(BIN)/flake8-async --enable ASYNC1,ASYNC2,ASYNC9 --disable ASYNC114,ASYNC910,ASYNC911,ASYNC912

# Every benchmark in its quick mode, to see that it works: tables on the terminal, JSON and plots in benchmarks/results.
# benchmarks/README.md explains them and has the last full results.
bench: setup
	$(BIN)/python benchmarks/run_all.py --quick

# In full, at most 40 minutes on two idle cores; writes the results into benchmarks/README.md.
bench-full: setup
	$(BIN)/python benchmarks/run_all.py

# The linters, the types (mypy for the code, pyright for the public API; pyright finds the package through PATH), and the
# tests that read the source: imports, sizes, public names, documents, language.
check: setup
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(FLAKE8_ASYNC)
	$(BIN)/mypy
	$(BIN)/basedpyright
	PATH="$(CURDIR)/$(BIN):$$PATH" basedpyright --ignoreexternal --verifytypes trio_rollout
	$(BIN)/pytest tests/project $(PYTEST_ARGS)

# The state diagrams of docs/lifecycles.md, from the tables in trio_rollout/_core.
pictures: setup
	$(BIN)/python docs/make_pictures.py

format: setup
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

# A real SGLang 0.5.23 on the CPU with a tiny random model: 3 GB, some minutes to install, two minutes to start.
setup-sglang: setup
	tests/real_sglang/setup.sh .venv-sglang $(PYTHON)

test-sglang: setup-sglang
	$(BIN)/pytest -m real_sglang $(PYTEST_ARGS)

# Real agents and clients, run offline against the tiny server. Those that npm cannot install are left out.
CLIENTS := tests/gateway/clients
setup-agents: .venv-agents/.installed
.venv-agents/.installed: $(CLIENTS)/requirements.txt $(CLIENTS)/package.json | setup
	test -x .venv-agents/bin/python || $(PYTHON) -m venv .venv-agents
	.venv-agents/bin/pip install --quiet -r $(CLIENTS)/requirements.txt
	mkdir -p .venv-agents/npm && cp $(CLIENTS)/package.json .venv-agents/npm
	npm install --silent --no-audit --no-fund --prefix .venv-agents/npm || echo "the agents of npm could not be installed"
	touch $@

test-agents: setup-agents
	$(BIN)/pytest -m agents $(PYTEST_ARGS)

# Ray is big, so it has a separate environment. It does not reap all of its processes, and warns about them.
RAY_WARNINGS := -W ignore::ResourceWarning -W ignore::pytest.PytestUnraisableExceptionWarning
setup-ray: .venv-ray/.installed

.venv-ray/.installed: pyproject.toml
	test -x .venv-ray/bin/python || $(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet --editable '.[test,ray]'
	touch $@

test-ray: setup-ray
	RAY_USAGE_STATS_ENABLED=0 .venv-ray/bin/pytest -m ray $(RAY_WARNINGS) $(PYTEST_ARGS)
