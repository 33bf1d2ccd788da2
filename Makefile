# The two commands of the README are `make run` and `make test`; `make help` lists the rest.
# Works on Debian 12 with Rust; other systems need the packages of deploy/install-needs.

# One for each clone, but RocksDB (a quarter of an hour of C++) is compiled once for all of them.
ifndef CARGO_TARGET_DIR
CARGO_TARGET_DIR := $(shell deploy/target-directory)
endif
export CARGO_TARGET_DIR

# rustup puts cargo there, and not every shell has it on its path.
export PATH := $(HOME)/.cargo/bin:$(PATH)

DATA_DIR ?= ./data
PACKAGES ?= ./packages
COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)
RELEASE := $(CARGO_TARGET_DIR)/release
# Outside the clone, so that figures can be held against older ones.
COMPARISON := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/slackwater/bench
BASELINE ?= main
FUZZ_SECONDS ?= 300
# Ends a program when make ends, also by SIGKILL. Not what it runs by sudo, which clears that.
LEASH := setpriv --pdeathsig TERM --
# Git ignores it, and the image's build context holds it.
IMAGE_DIR := .cache/image

.DEFAULT_GOAL := help
# Nothing is asked for a password in a directory of one's own.
AS_ROOT := $(if $(DESTDIR),,$(if $(filter 0,$(shell id -u)),,sudo))
INSTALL = $(AS_ROOT) env RELEASE=$(RELEASE) $(foreach name,PREFIX UNITDIR SYSCONFDIR DESTDIR,$(if $($(name)),$(name)=$($(name)))) deploy/install

.PHONY: help run build install install-appliance install-worker uninstall packages tarball vm dist quick test check deny soak bench bench-needs bench-save bench-check compare needs test-needs test-compose test-appliance test-engines fuzz image up down clean-data

help: ## List the commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

needs:
	@deploy/install-needs build
	@deploy/target-directory --make >/dev/null

test-needs: needs
	@deploy/install-needs test

build: needs ## Compile everything, optimized
	cargo build --release --workspace --bins

# Root of a client is root here: containers mount and write as root. Only this machine can
# connect, as both addresses are loopback, and its users need the token in $(DATA_DIR)/admin-token.
run: build ## Install what is missing, build, and serve on storage under ./data
	exec $(RELEASE)/slackwaterd --data-dir $(DATA_DIR) --squash no_root_squash $(ARGS)

install: build ## Install what an appliance and a worker need; nothing is started
	$(INSTALL) appliance
	$(INSTALL) worker

install-appliance: build ## Install slackwaterd, slackwater, units, manual pages, completions below PREFIX (/usr/local)
	$(INSTALL) appliance

install-worker: build ## Install slackwater-driver and slackwater, likewise
	$(INSTALL) worker

uninstall: ## Take away what was installed; settings and data stay
	$(INSTALL) uninstall

packages: build ## Build Debian packages into PACKAGES (./packages): slackwater, -client, -driver
	@deploy/install-needs packages debhelper lintian
	RELEASE=$(RELEASE) deploy/packages $(PACKAGES)

tarball: build ## Build an archive for other Linux systems into PACKAGES: the programs, and what installs them
	@deploy/install-needs packages patchelf
	RELEASE=$(RELEASE) deploy/tarball $(PACKAGES)

vm: build ## Build the appliance's virtual machine into PACKAGES (as root): a disk, and the same as qcow2
	@deploy/install-needs packages debhelper lintian
	@deploy/install-needs vm
	rm -rf .cache/vm
	RELEASE=$(RELEASE) deploy/packages .cache/vm
	$(if $(filter 0,$(shell id -u)),,sudo) deploy/vm/build .cache/vm $(PACKAGES)

dist: build ## Build packages, archive, virtual machine and SHA256SUMS into an empty PACKAGES
	@deploy/install-needs packages debhelper lintian patchelf
	RELEASE=$(RELEASE) deploy/dist $(PACKAGES)

check: test-needs ## Formatting and lints
	cargo fmt --all -- --check
	cargo clippy --release --workspace --all-targets -- -D warnings
	cargo check --release -p slackwater-api --no-default-features

# Takes the advisories from GitHub, and is compiled on its first run (some minutes). What needs
# neither is held by server/tests/dependencies.rs, which `make test` runs.
deny: needs ## Hold the dependencies against deny.toml and RustSec's advisories (network)
	@command -v cargo-deny >/dev/null || cargo install --locked cargo-deny
	cargo deny --all-features check

# Unit tests that need root have names that begin with `as_root_`.
quick: needs ## Formatting, lints, unit and model tests: minutes, without root
	cargo fmt --all -- --check
	cargo clippy --release --workspace --all-targets -- -D warnings
	cargo test --release --workspace --lib --bins --test model -- \
		$(if $(filter 0,$(shell id -u)),,--skip as_root_)

test: check ## Install what is missing, then formatting, lints, and every test
	$(LEASH) cargo build --release --workspace --bins
	$(LEASH) cargo test --release --workspace --no-run
	@$(LEASH) tests/all

soak: build ## Kill the server 300 times, cut its power 50 times, load it for ten minutes
	$(LEASH) tests/soak/run kill $(ARGS)
	$(LEASH) env SLACKWATERD=$(RELEASE)/slackwaterd tests/power/run
	$(LEASH) tests/soak/run load

bench-needs: build
	@deploy/install-needs bench

bench: bench-needs ## Hold the promises on latency against XFS, side by side (as root)
	$(RELEASE)/slackwater-bench clone $(ARGS)

compare: bench-needs ## Hold the promises on speed against the rivals, with plots (as root)
	@mkdir -p $(COMPARISON)
	$(RELEASE)/slackwater-bench compare --json $(COMPARISON)/comparison.json --svg $(COMPARISON) $(ARGS)

bench-save: bench-needs ## Run the benches and keep what they measure as the baseline (as root)
	cargo bench -p slackwater-benches --benches -- --save-baseline $(BASELINE) $(ARGS)

bench-check: bench-needs ## Run the benches; fail if one is slower than its baseline (as root)
	cargo bench -p slackwater-benches --benches -- --baseline-lenient $(BASELINE) $(ARGS)
	$(RELEASE)/slackwater-bench regressions --baseline $(BASELINE)

test-compose: build ## Try `make up` and `make down` on a Docker of its own (as root)
	$(LEASH) tests/compose/run

test-appliance: build ## Try the packages on Debian 12 and 13, and the virtual machine: use it, cut its power, update it (as root)
	$(LEASH) tests/units/run
	$(LEASH) tests/units/run --suite trixie
	$(LEASH) tests/vm/run $(ARGS)

test-engines: build ## Try the driver under real Docker and containerd (as root)
	$(LEASH) tests/engines/run $(ARGS)

fuzz: needs ## Look for inputs that break something, each target for FUZZ_SECONDS (300)
	fuzz/run $(FUZZ_SECONDS)

# The image takes the programs that were built here, so that no compiler and no registry is
# needed inside: only the base image. One at a time, since all put the programs into the same place.
image: build ## Build the container image slackwater
	mkdir -p $(IMAGE_DIR)
	flock $(IMAGE_DIR) sh -ec ' \
		install -s -m 755 $(RELEASE)/slackwaterd $(RELEASE)/slackwater $(RELEASE)/slackwater-driver $(IMAGE_DIR); \
		SLACKWATER_IMAGE_TARGET=prebuilt $(COMPOSE) build slackwater $(findstring worker,$(COMPOSE_PROFILES))'

up: image ## Start the appliance and a registry with docker-compose
	# Users of containers read these, also of a clone that was made with umask 077.
	chmod -R go+rX deploy/prometheus deploy/grafana
	SLACKWATER_IMAGE_TARGET=prebuilt $(COMPOSE) up -d

down: ## Stop what `make up` started
	COMPOSE_PROFILES=monitoring,worker $(COMPOSE) down

clean-data: ## Delete the storage under ./data
	rm -rf $(DATA_DIR)
