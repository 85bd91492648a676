# SPDX-License-Identifier: Apache-2.0
# make demo   the main job, end to end            make test          everything that CI checks
# make setup  only prepare .venv                  make test-native   the C++ core alone, plain and under TSan and ASan
# make bench  our figures on this machine         make bench-peers   the same next to iceoryx2, zmq, zenoh, …
# make conformance  which test asserts which requirement                    make lock   pin the dependencies anew
# make mutants      known mistakes, each noticed by the tests that claim its requirement: some minutes
#
# A fresh machine needs make, gcc/g++, cmake, Java 17 and some python3. Nothing outside this folder is touched.

SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: setup demo test check test-native bench bench-peers stubs conformance mutants lock clean

UV_VERSION := 0.13.7
UV := .uv/bin/uv
PY := .venv/bin/python
export UV_PYTHON_DOWNLOADS ?= never
export UV_NO_PROGRESS := 1
export UV_LINK_MODE ?= copy
export UV_COMPILE_BYTECODE := 1

setup: .venv/.installed

demo: setup
	$(PY) -m tensorpool demo

test: setup
	$(MAKE) --jobs 2 --output-sync=target check test-native
	$(PY) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

bench: setup
	$(PY) -m benchmarks.core

bench-peers: setup .venv/.bench
	$(PY) -m benchmarks.peers

check: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache

# --- the environment: a local uv, a .venv from the lock file, the native module built into it

$(UV):
	python3 -m venv .uv
	.uv/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

.venv/.locked: requirements.lock .python-version | $(UV)
	$(UV) venv --quiet --allow-existing .venv
	$(UV) pip sync --quiet --python $(PY) --require-hashes requirements.lock
	@touch $@

NATIVE := CMakeLists.txt $(wildcard native/*.hpp native/*.cpp)

.venv/.installed: .venv/.locked pyproject.toml $(NATIVE)
	$(UV) pip install --quiet --python $(PY) --no-deps --no-build-isolation --editable .
	$(PY) -m compileall -q src
	@touch $@

# The packages we are compared with: beside the locked ones, and gone again when those are synced anew.
.venv/.bench: requirements-bench.lock .venv/.locked
	$(UV) pip install --quiet --python $(PY) --require-hashes --requirements requirements-bench.lock
	@touch $@

lock: $(UV)
	$(UV) pip compile --quiet --universal --generate-hashes --no-annotate --no-header --no-emit-index-url \
	    --python-version 3.12 --all-extras --group dev --output-file requirements.lock pyproject.toml
	$(UV) pip compile --quiet --universal --generate-hashes --no-annotate --no-header --no-emit-index-url \
	    --python-version 3.12 --group bench --constraint requirements.lock --output-file requirements-bench.lock

# The typed face of the native module, generated and checked in; a test fails when it drifts.
stubs: setup
	$(PY) -m nanobind.stubgen --quiet --include-private -m tensorpool._core -p native/stubs.pattern -o src/tensorpool/_core.pyi
	$(PY) -m tensorpool.wire.stubs

# Which test asserts which requirement: docs/conformance.md, generated and checked in; a test fails when it drifts.
conformance: setup
	$(PY) -m tests.conformance.matrix

# Every row of tests/mutants/mutants.tsv in a scratch copy of the source; never in this folder.
mutants: setup
	$(PY) -m tests.mutants

# The headers without Python: plain, under ThreadSanitizer, under AddressSanitizer and UBSan.
test-native: $(addprefix test-native-,plain thread address)

test-native-%:
	@mkdir -p build
	cmake -S . -B build/native-$* -DTENSORPOOL_NATIVE_TESTS=ON -DTENSORPOOL_SANITIZE=$(SANITIZE_$*) \
	    -DCMAKE_BUILD_TYPE=RelWithDebInfo > build/native-$*.log 2>&1 || (cat build/native-$*.log; false)
	cmake --build build/native-$* --parallel 2 > build/native-$*.log 2>&1 || (cat build/native-$*.log; false)
	ctest --test-dir build/native-$* --output-on-failure

SANITIZE_thread := thread
SANITIZE_address := address,undefined

clean:
	rm -rf .venv .uv build .mypy_cache .ruff_cache .pytest_cache
