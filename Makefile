# SPDX-License-Identifier: Apache-2.0
# make demo   the main job, end to end            make quick         decisions, bytes, memory: two minutes, with coverage
# make setup  only prepare .venv                  make test          everything that CI checks: ten minutes
# make check  linters and types                   make soak          hours: chaos, long fuzzing, mutants, the scenario
#                                                 make test-native   the C++ core alone, plain and under TSan and ASan
# make bench  our figures on this machine         make bench-peers   the same next to iceoryx2, zmq, zenoh, …
# make conformance  which test asserts which requirement                    make lock   pin the dependencies anew
# make docs         the documentation as a site: build/site       make pictures   the console's, in docs/pictures
# make mutants      known mistakes, each noticed by the tests that claim its requirement: many minutes
# make wheel        sdist and wheel in dist/, tried in fresh environments     make test-native-aarch64   under qemu
#
# A fresh machine needs make, g++, cmake, a CPython of at least 3.12 and, for Spark, Java 17, for the console's page npm.
# `make setup` and `make demo` leave nothing outside this folder. PYTHON=3.12 or PYTHON=/path/to/python chooses an
# interpreter.

SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: setup demo quick test soak check spark-archive test-native wheel bench bench-peers docs pictures stubs conformance configuration mutants lock clean

UV_VERSION := 0.13.7
UV := .uv/bin/uv
PY := .venv/bin/python
export UV_PYTHON_DOWNLOADS ?= never
export UV_NO_PROGRESS := 1
# The cache is in this folder, on one disk with .venv, which then is made of links; or where you say.
ifdef UV_CACHE_DIR
export UV_LINK_MODE ?= copy
else
export UV_CACHE_DIR := $(CURDIR)/.uv/cache
endif
export UV_COMPILE_BYTECODE := 1
# What the console's page uses of others; without npm there is none, and `make setup` says so.
WEB_MODULES := src/tensorpool/console/web/vendor/LICENSES.txt

setup: .venv/.installed $(WEB_MODULES)

demo: setup
	MPLCONFIGDIR=$(CURDIR)/build/matplotlib XDG_CACHE_HOME=$(CURDIR)/build/cache JDK_JAVA_OPTIONS=-XX:-UsePerfData $(PY) -m tensorpool demo

# Tests mostly wait, for timers and other processes: two workers a core.
PYTEST := $(PY) -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder
SOAK ?= 60

# The levels of tests: tests/levels.py.
quick: setup
	$(PYTEST) -m quick --cov --cov-report=
	.venv/bin/coverage report --sort=-cover | tail -n 22

test: setup
	.ci/stage "checks, native tests, class archive, site" \
	    $(MAKE) --jobs 2 --output-sync=target check test-native spark-archive docs
	.ci/stage "pytest" $(PYTEST) || .ci/stage "what failed, once more without neighbours" $(PY) -m pytest --last-failed

soak: setup spark-archive dist/.built
	.ci/stage "tests of the soak level" $(PY) -m pytest -m soak
	TENSORPOOL_SOAK=$(SOAK) .ci/stage "random tests, $(SOAK) times as long" \
	    $(PY) -m pytest --timeout 7200 tests/property tests/fuzz tests/fault
	.ci/stage "native tests as aarch64" $(MAKE) test-native-aarch64
	.ci/stage "torn reads" $(PY) -m benchmarks.torn_reads
	.ci/stage "bridge on bad networks" $(PY) -m benchmarks.bridge_soak
	.ci/stage "bridge under kills" $(PY) -m benchmarks.bridge_soak --kills
	.ci/stage "scenario" $(PY) -m benchmarks.scenario
	.ci/stage "mutants of the slot protocol" $(PY) -m tests.native.mutants
	.ci/stage "mutants" $(PY) -m tests.mutants

bench: setup
	$(PY) -m benchmarks.core

bench-peers: setup .venv/.bench
	$(PY) -m benchmarks.peers

check: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/clang-format --dry-run --Werror $(filter %.hpp %.cpp,$(NATIVE)) $(wildcard tests/native/*.hpp tests/native/*.cpp benchmarks/native_pair.cpp)
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache

# --- the environment: a local uv, a .venv from the lock file, the native module built into it

$(UV):
	python3 -m venv .uv
	.uv/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir uv==$(UV_VERSION)

.venv/.locked: requirements.lock | $(UV)
	python=$${PYTHON:-$$(.uv/bin/python .ci/newest_python.py $(UV))} && $(UV) venv --quiet --allow-existing --python "$$python" .venv
	@mkdir -p .uv/tmp
	TMPDIR=$(CURDIR)/.uv/tmp $(UV) pip sync --quiet --python $(PY) --require-hashes requirements.lock
	@touch $@

NATIVE := CMakeLists.txt $(wildcard native/*.hpp native/bindings/*)

.venv/.installed: .venv/.locked pyproject.toml $(NATIVE)
	$(UV) pip install --quiet --python $(PY) --no-deps --no-build-isolation --editable .
	$(PY) -m compileall -q src
	@touch $@

$(WEB_MODULES): package-lock.json .ci/web_modules.py
	@if command -v npm > /dev/null; then python3 .ci/web_modules.py; \
	    else echo "npm is not installed, so \`tensorpool console\` has no page: apt-get install npm, then make setup"; fi

# --- the distribution: a source archive and, built from it, a wheel for every CPython from 3.12 on

wheel: dist/.built
	$(PY) -m pytest -m soak tests/wheel

dist/.built: .venv/.installed $(WEB_MODULES) $(shell find src -type f -not -name '*.pyc') README.md LICENSE
	rm -rf dist build/unrepaired
	$(UV) build --quiet --python $(PY) --no-build-isolation --out-dir build/unrepaired
	PATH="$(CURDIR)/.venv/bin:$$PATH" auditwheel --verbose repair --wheel-dir dist build/unrepaired/*.whl > build/auditwheel.log 2>&1 \
	    || (cat build/auditwheel.log; false)
	cp build/unrepaired/*.tar.gz dist
	@touch $@

# The packages we are compared with: beside the locked ones, and gone again when those are synced anew. eCAL asks for a
# protobuf below 7, which the part of it that we use does without: the lock overrides it, and lists all that is needed.
.venv/.bench: requirements-bench.lock .venv/.locked
	$(UV) pip install --quiet --python $(PY) --no-deps --require-hashes --requirements requirements-bench.lock
	@touch $@

# The documentation as a site. A warning is an error: a broken link, a page that no menu has.
docs: setup .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --clean

.venv/.docs: requirements-docs.lock .venv/.locked
	$(UV) pip install --quiet --python $(PY) --require-hashes --requirements requirements-docs.lock
	@touch $@

# Not of the extra torch: its packages are gigabytes, and the tests of the datasets do without.
lock: $(UV)
	$(UV) pip compile --quiet --universal --generate-hashes --no-annotate --no-header --no-emit-index-url \
	    --python-version 3.12 --extra console --extra spark --extra ingest --extra export --extra notebook --group dev --output-file requirements.lock pyproject.toml
	$(UV) pip compile --quiet --universal --generate-hashes --no-annotate --no-header --no-emit-index-url \
	    --python-version 3.12 --group bench --constraint requirements.lock --override <(echo "protobuf>=7") --output-file requirements-bench.lock
	$(UV) pip compile --quiet --universal --generate-hashes --no-annotate --no-header --no-emit-index-url \
	    --python-version 3.12 --group docs --constraint requirements.lock --output-file requirements-docs.lock
	@mkdir -p build/npm && cp package.json package-lock.json build/npm
	cd build/npm && npm install --package-lock-only --omit-lockfile-registry-resolved --cache cache && cp package-lock.json ../..

# The typed face of the native module, generated and checked in; a test fails when it drifts.
stubs: setup
	$(PY) -m nanobind.stubgen --quiet --include-private -m tensorpool._core -p native/stubs.pattern -o src/tensorpool/_core.pyi
	$(PY) -m tensorpool.wire.stubs

# The console's views, light and dark, of a real driver with real cameras: docs/pictures/console-*.png, checked in.
pictures: setup
	$(PY) -m tests.console_page.pictures

# Which test asserts which requirement: docs/conformance.md, generated and checked in; a test fails when it drifts.
conformance: setup
	$(PY) -m tests.conformance.matrix

# Spark's classes in a form that Java starts from in half the time; kept in build/ until Java or Spark change.
spark-archive: setup
	$(PY) -m tests.support.jvm

# Every key of every configuration file: docs/configuration.md, generated and checked in; a test fails when it drifts.
configuration: setup
	$(PY) -m tests.settings_reference

# Every row of tests/mutants/mutants.tsv in a scratch copy of the source; never in this folder.
mutants: setup
	$(PY) -m tests.mutants

# The headers without Python: plain, under ThreadSanitizer, under AddressSanitizer and UBSan.
test-native: $(addprefix test-native-,plain thread address)

test-native-%:
	@mkdir -p build
	cmake -S . -B build/native-$* -DTENSORPOOL_NATIVE_TESTS=ON -DTENSORPOOL_SANITIZE=$(SANITIZE_$*) \
	    -DCMAKE_BUILD_TYPE=RelWithDebInfo $(CMAKE_$*) > build/native-$*.log 2>&1 || (cat build/native-$*.log; false)
	cmake --build build/native-$* --parallel 2 > build/native-$*.log 2>&1 || (cat build/native-$*.log; false)
	ctest --test-dir build/native-$* --output-on-failure

SANITIZE_thread := thread
SANITIZE_address := address,undefined

# Cross-compiled and run under emulation: it proves that the code works there, not its memory order, which is the host's.
AARCH64_PACKAGES := g++-aarch64-linux-gnu qemu-user
CMAKE_aarch64 := -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
    "-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;/usr/aarch64-linux-gnu"

test-native-aarch64: aarch64-tools
.PHONY: aarch64-tools
aarch64-tools:
	@(command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64) > /dev/null \
	    || ([ "$$(id -u)" = 0 ] && apt-get install --yes --no-install-recommends $(AARCH64_PACKAGES)) \
	    || (echo "make test-native-aarch64 needs Debian's packages $(AARCH64_PACKAGES): apt-get install $(AARCH64_PACKAGES)"; false)

clean:
	rm -rf .venv .uv build dist .mypy_cache .ruff_cache .pytest_cache
