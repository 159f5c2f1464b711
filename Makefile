# What a newcomer types. Needs cargo, a C compiler, and python3 for one of the benchmarks.

CARGO ?= cargo
# Recordings of other tools, kept outside the project; tests and the demo use them when they are there.
GPUMEM_SAMPLES ?= $(abspath $(wildcard ../shared/samples))
export GPUMEM_SAMPLES

CTL = $(or $(CARGO_TARGET_DIR),target)/release/gpumemctl
SAMPLE_LOGS = $(sort $(wildcard $(addsuffix /tbd-log/*.log,$(GPUMEM_SAMPLES))))

.PHONY: build demo test lint bench clean

build:
	$(CARGO) build --release --locked -p gpumemctl

# The report of the recording that the project ships, and of the real ones where they are.
demo: build
	@for log in tests/data/small-train.log $(SAMPLE_LOGS); do \
	  printf '\n$$ gpumemctl report %s\n' "$$(basename "$$log")"; \
	  $(CTL) report "$$log" || exit 1; \
	done

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings

test:
	$(CARGO) test --workspace --locked

# Each figure beside its floor, measured in the same run.
bench: build
	$(CARGO) run --release --locked -p gpumem-tests --bin bench

clean:
	$(CARGO) clean
