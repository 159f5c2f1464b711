# What a newcomer types. Needs cargo, a C compiler, and python3 for one of the benchmarks.

CARGO ?= cargo
# Recordings of other tools, kept outside the project; tests use them when they are there.
ifndef GPUMEM_SAMPLES
GPUMEM_SAMPLES := $(shell cd ../shared/samples 2> /dev/null && pwd)
endif
export GPUMEM_SAMPLES

TARGET = $(or $(CARGO_TARGET_DIR),target)
FAKE = $(TARGET)/fake-gpu
# make does not support spaces in paths, so paths below this folder stay relative.
FAKE_FROM_TESTS = $(if $(filter /%,$(TARGET)),$(FAKE),../../$(FAKE))

# Paths of the builder's machine stay out of the programs: they would make two builds differ. Flags are separated by the byte 0x1f, since
# paths may have spaces.
PLAIN_PATHS := $(shell for flag in $(RUSTFLAGS); do printf '%s\037' "$$flag"; done; \
  printf -- '--remap-path-prefix=%s/registry/src/=crates/\037--remap-path-prefix=%s/=' "$${CARGO_HOME:-$$HOME/.cargo}" "$$PWD")
build deb rpm tarball image wheel bench: export CARGO_ENCODED_RUSTFLAGS := $(PLAIN_PATHS)

.PHONY: build fake-gpu demo reports test test-all soak race kills fuzz lint figures shots bench wheel clean
.PHONY: install uninstall deb rpm tarball image sizes reproducible deny advisories

build:
	$(CARGO) build --release --locked -p gpumemd -p gpumemctl -p gpumem-mcp -p gpumem-agent

# The simulated GPU machine, and a program that trains on it (or on a real GPU).
fake-gpu:
	@$(MAKE) -s -C tests/fake-gpu OUT="$(FAKE_FROM_TESTS)"
	@$(MAKE) -s -C tests/trainer OUT="$(FAKE_FROM_TESTS)"
	@$(MAKE) -s -C tests/mixer OUT="$(FAKE_FROM_TESTS)"

# A training run, explained while it runs and afterwards; on this machine's GPU, or else on a simulated one. The profile `demo` compiles
# faster than `release`.
demo:
	@tests/tools/surroundings.sh demo
	$(CARGO) build --profile demo --locked -p gpumemd -p gpumemctl -p gpumem-mcp -p gpumem-agent
	@$(MAKE) -s fake-gpu
	@tests/demo.sh $(TARGET)/demo $(FAKE)

# The report of the recording that the project ships, and of the real ones where they are.
reports: $(if $(filter command line environment,$(origin PROGRAMS)),,build)
	@for log in tests/data/small-train.log "$$GPUMEM_SAMPLES"/tbd-log/*.log; do \
	  [ -e "$$log" ] || continue; \
	  printf '\n$$ gpumemctl report %s\n' "$$(basename "$$log")"; \
	  "$(PROGRAMS)"/gpumemctl report "$$log" || exit 1; \
	done

# Pictures of all pages and of terminals on a simulated GPU, for people who change them. Needs Chromium and tmux.
shots: fake-gpu $(if $(filter command line environment,$(origin PROGRAMS)),,build)
	@tests/tools/screenshot.sh "$(PROGRAMS)" $(FAKE) --set $(TARGET)/shots

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	$(CARGO) fmt --manifest-path fuzz/Cargo.toml --check
	$(CARGO) clippy --manifest-path fuzz/Cargo.toml --target-dir $(TARGET) --all-features --locked -- -D warnings
	python3 tests/tools/prose.py

# Figures about the code's structure, for each crate: production lines, import cycles, imports against the layers, long
# functions and small files. DETAILS=1 lists the places behind each number; tests/suite/tidy holds the limits.
figures:
	@$(CARGO) run -q --locked -p gpumem-tests --bin figures -- $(if $(DETAILS),--details)

# The fast suite: needs cargo, a C compiler, make and python3, and no network once crates are there. ONLY=TEXT: tests with that name.
test:
	@tests/tools/surroundings.sh test
	@CARGO="$(CARGO)" tests/tools/lanes.py fast --only "$(ONLY)"

# The fast suite and the slow lanes, or LANES="torch fleet"; tests/tools/lanes.py --list has them. GPUMEM_TOOLS_REQUIRED=1 makes a skip a failure.
test-all:
	@tests/tools/surroundings.sh test
	@CARGO="$(CARGO)" tests/tools/lanes.py $(or $(LANES),--all) --only "$(ONLY)"

# A node on which programs come and go while things go wrong: ten minutes, HOURS=1, or SOAK_SECONDS=N; SEED=N as it was printed. Then
# CALLS random calls of one program. The simulated machine's truth beside both; tests/suite/soak.rs has the plan.
SOAK_SECONDS ?= $(if $(HOURS),$(shell expr $(HOURS) \* 3600),600)
SEED ?= $(shell date +%s)
soak:
	SOAK_SECONDS=$(SOAK_SECONDS) SOAK_SEED=$(SEED) GPUMEM_SOAK_CALLS=$(or $(CALLS),10000000) \
	  $(CARGO) test --release --locked -p gpumem-tests --test suite -- soak:: --nocapture --test-threads=1

# The agent's lock-free parts under loom, its tests under ThreadSanitizer, C programs with it under valgrind; minutes.
race:
	CARGO="$(CARGO)" tests/races/run.sh

# Writers of the run store and whole daemons, killed a thousand times each; ten minutes.
kills:
	GPUMEM_KILLS=$(or $(KILLS),1000) $(CARGO) test --locked -p gpumem-runs --test suite store::crash::acknowledged -- --nocapture
	GPUMEM_KILLS=$(or $(KILLS),1000) $(CARGO) test --locked -p gpumemd --test suite kills_cost -- --nocapture

# Mutated bytes for everything that reads bytes of strangers, and generated cases with a new seed; fuzz/README.md. Half an hour and more.
fuzz:
	CARGO="$(CARGO)" python3 fuzz/run.py --runs $(or $(RUNS),1000000) --seconds $(or $(SECONDS),0) $(TARGETS)
	PROPTEST_RNG_SEED=$$(date +%s) PROPTEST_CASES=$(or $(CASES),20000) $(CARGO) test --release --locked -p gpumem-ledger -p gpumem-wire
	GPUMEM_FUZZ=$(or $(CASES),20000) $(CARGO) test --release --locked -p gpumem-agent --lib python::fuzz

# How long things take, on a quiet machine: the tests' bars, then each figure beside its floor, measured in the same run.
bench: build fake-gpu
	@CARGO="$(CARGO)" tests/tools/lanes.py fast timing peers systemd --bars
	$(CARGO) run --release --locked -p gpumem-tests --bin bench
	$(CARGO) run --release --locked -p gpumemd --example day

# The Python package with the agent and both programs, for systems from glibc 2.17 on: target/wheel/.
wheel:
	CARGO="$(CARGO)" python3 agent-lib/python/build_wheel.py --out $(TARGET)/wheel

# Installs the build to PREFIX; packaging/install.sh documents the layout and further settings.
PREFIX ?= /usr/local
PROGRAMS ?= $(TARGET)/release
install:
	@PREFIX="$(PREFIX)" DESTDIR="$(DESTDIR)" packaging/install.sh install "$(PROGRAMS)"
	@echo "installed below $(DESTDIR)$(PREFIX); next: gpumemctl doctor, docs/install.md"

uninstall:
	@PREFIX="$(PREFIX)" DESTDIR="$(DESTDIR)" packaging/install.sh uninstall

# The Debian package; the last line is its path.
deb: $(if $(filter command line environment,$(origin PROGRAMS)),,build)
	@packaging/deb.sh "$(PROGRAMS)" $(TARGET)/package

# An archive that runs from any folder, for systems from glibc 2.17 on; the last line is its path.
OLD_PROGRAMS = $(TARGET)/wheel-programs
tarball:
	@CARGO="$(CARGO)" python3 agent-lib/python/build_wheel.py --programs-only
	@packaging/tarball.sh $(OLD_PROGRAMS) $(TARGET)/package

# The RPM, for systems from glibc 2.17 on (RHEL 7); the last line is its path. Needs rpmbuild.
rpm: rpm_programs = $(if $(filter command line environment,$(origin PROGRAMS)),$(PROGRAMS),$(OLD_PROGRAMS))
rpm:
	$(if $(filter $(OLD_PROGRAMS),$(rpm_programs)),@CARGO="$(CARGO)" python3 agent-lib/python/build_wheel.py --programs-only)
	@packaging/rpm.sh "$(rpm_programs)" $(TARGET)/package

# The container image, as an OCI archive; the last line is its path. Needs buildah and mmdebstrap, no Docker.
image: $(if $(filter command line environment,$(origin PROGRAMS)),,build)
	@packaging/image.sh "$(PROGRAMS)" $(TARGET)/package

# Two builds of the package are equal; half an hour, see there.
reproducible:
	@CARGO="$(CARGO)" packaging/reproducible.sh $(TARGET)/reproducible

# Licences, sources and build scripts of all crates, as deny.toml has them; tests/suite/package/supply.rs does the same.
deny:
	$(CARGO) fetch --locked
	cargo-deny --offline --locked check bans licenses sources
	for tools in fuzz tests/races; do $(CARGO) fetch --locked --manifest-path $$tools/Cargo.toml && \
	  cargo-deny --offline --locked --config fuzz/deny.toml --manifest-path $$tools/Cargo.toml check bans sources || exit 1; done

# Known vulnerabilities in dependencies. Queries a database on the network, so it is not a test. DB=FOLDER uses a clone
# of the database.
advisories:
	@DB="$(DB)" packaging/advisories.sh $(TARGET)

# What there is of packages, and what takes the room in them.
sizes:
	@packaging/sizes.sh $(TARGET)

clean:
	$(CARGO) clean
