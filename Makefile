# All commands for developers; they work in a fresh clone. The first target that needs .venv builds it from
# requirements.lock, using the package index that pip is configured for.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Without bytecode, each of the thousands of processes that tests start would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# Tests wait a lot: with two processes two cores are idle for more than a third of the time, with four for a twelfth.
# Each process has its own servers; the tests of a file share the servers that they start.
PROCESSES ?= 4
PYTEST = $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder --durations 10

# $(call debian-install,PACKAGE): install a Debian package; if that fails, update the package lists and retry.
debian-install = export DEBIAN_FRONTEND=noninteractive; \
	apt-get install -y --no-install-recommends $(1) || { apt-get update && apt-get install -y --no-install-recommends $(1); }

# Test whether system packages can be installed: as root, on Debian or a derivative.
is-debian-root = [ "$$(id -u)" = 0 ] && [ -e /etc/debian_version ]

.PHONY: help
help: ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(INSTALLED) java ## build .venv and check for Java (other targets do this if needed)

$(INSTALLED): requirements.lock setup.cfg
	@command -v $(PYTHON) >/dev/null || { \
		echo "There is no $(PYTHON) on PATH; install Python 3.11 or newer, or run: make setup PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is $$($(PYTHON) -V 2>&1), but 3.11 or newer is needed; run: make setup PYTHON=/path/to/newer/python3" >&2; exit 1; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV) || { \
		echo "$(PYTHON) cannot create a virtual environment; on Debian: apt-get install python3-venv" >&2; rm -rf $(VENV); exit 1; }
	@echo "Installing $$(grep -c '==' requirements.lock) packages into $(VENV); this takes a few minutes the first time."
	$(BIN)/python -m pip install --quiet -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	$(BIN)/python -m pip check
	@touch $@

# Spark prefers JAVA_HOME over PATH, so the version of that Java is checked.
.PHONY: java
java:
	@major() { \
		"$${JAVA_HOME:+$$JAVA_HOME/bin/}java" -version 2>&1 | sed -nE 's/.* version "(1\.)?([0-9]+).*/\2/p' | head -n 1; \
	}; \
	found=$$(major || true); \
	if [ "$${found:-0}" -ge 17 ]; then exit 0; fi; \
	if [ -z "$${JAVA_HOME:-}" ] && $(is-debian-root); then $(call debian-install,openjdk-17-jre-headless); exit 0; fi; \
	echo "Spark needs Java 17 or newer, but $${JAVA_HOME:-PATH} has $${found:-none}; install a JRE" \
		"(on Debian: apt-get install openjdk-17-jre-headless) or point JAVA_HOME to one." >&2; \
	exit 1

# Some tests need collations and extensions that the Postgres of the Python wheel lacks; they are skipped without these
# binaries.
.PHONY: postgres
postgres: | java
	@if compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null; then exit 0; fi; \
	if $(is-debian-root); then $(call debian-install,postgresql); exit 0; fi; \
	echo "Tests that need a full Postgres are skipped: there is none in /usr/lib/postgresql (on Debian: apt-get install postgresql)." >&2

# The MySQL sink is tested with Debian's MariaDB. The tests start their own servers; the package's service remains off.
.PHONY: mariadb
mariadb: | java
	@if [ -x /usr/sbin/mariadbd ]; then exit 0; fi; \
	if $(is-debian-root); then \
		[ -e /usr/sbin/policy-rc.d ] || { printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d; \
			chmod +x /usr/sbin/policy-rc.d; trap 'rm -f /usr/sbin/policy-rc.d' EXIT; }; \
		$(call debian-install,mariadb-server); exit 0; \
	fi; \
	echo "Tests of the MySQL sink are skipped: there is no /usr/sbin/mariadbd (on Debian: apt-get install mariadb-server)." >&2

# The page is tested in a real browser; without a browser, these tests are skipped.
.PHONY: chromium
chromium: | java
	@if [ -x /usr/bin/chromium ]; then exit 0; fi; \
	if $(is-debian-root); then $(call debian-install,chromium); exit 0; fi; \
	echo "Tests of the page in a browser are skipped: there is no /usr/bin/chromium (on Debian: apt-get install chromium)." >&2

# Jars that Spark does not include, fetched once: the packages that users set in spark.jars.packages and tests need.
.PHONY: jars
jars: $(INSTALLED) java
	@echo "Fetching the jars of Delta Lake and of Spark for Kafka, if they are missing."; $(BIN)/python -m tests.support.spark_jars || \
		echo "Tests of Delta Lake and of Kafka as a source are skipped: their jars cannot be fetched from Maven Central." >&2

# Hadoop's minicluster, which provides HDFS for tests of the files sink.
.PHONY: hdfs
hdfs: $(INSTALLED) java
	@echo "Fetching the jar of Hadoop's minicluster, if it is missing."; $(BIN)/python -m tests.support.hdfs || \
		echo "Tests of files in HDFS are skipped: the jar cannot be fetched from Maven Central." >&2

# Kafka's own broker, for tests of the Kafka sink.
.PHONY: kafka
kafka: $(INSTALLED) java
	@echo "Fetching the jars of Kafka, if they are missing."; $(BIN)/python -m tests.support.kafka_server || \
		echo "Tests against Kafka are skipped: its jars cannot be fetched from Maven Central." >&2

# The systems that the benchmarks compare with and that have tests.
.PHONY: peers
peers: $(INSTALLED) java
	@echo "Fetching the jars of Debezium and Flink, if they are missing."; $(BIN)/python -m benchmarks.peers || \
		echo "Tests of the benchmarks with Debezium, Flink and Spark's JDBC are skipped: they need Maven Central and a JDK." >&2

.PHONY: all-test-tools
all-test-tools: $(INSTALLED) java postgres mariadb chromium jars hdfs kafka

.PHONY: test
test: all-test-tools ## run the tests in PROCESSES processes (4 by default), with few cases of long tests
	$(PYTEST) --thin

.PHONY: test-thorough
test-thorough: all-test-tools peers ## run all cases of all tests, which takes more than twice as long as test
	$(PYTEST)

.PHONY: test-fast
test-fast: $(INSTALLED) postgres ## run the quick tests: no Spark, no Airflow, no servers but Postgres
	$(PYTEST) --ignore tests/airflow --ignore tests/airflow_shells \
		-m "not spark and not airflow and not slow and not lengthy and not servers"

# Debian has MySQL only in its unstable distribution; the package is unpacked, not installed.
test-mysql: DIRECTORY ?= /var/tmp/airflow-cdc-mysql
.PHONY: test-mysql
test-mysql: $(INSTALLED) java ## run the tests of the MySQL sink with MySQL, which is fetched into DIRECTORY
	MYSQLD=$$($(BIN)/python -m tests.support.mysql_server $(DIRECTORY)) $(PYTEST) tests/sinks/mysql

.PHONY: lint
lint: $(INSTALLED) ## check style, formatting, imports between folders, and the length of files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports setup.cfg --no-cache
	@! find airflow_cdc_provider benchmarks dags demo docs/examples local_servers -name '*.py' -exec wc -l {} + \
		| awk '$$2 != "total" && $$1 > 400 { print $$2 " has " $$1 " lines; 400 are allowed" }' | grep . >&2

.PHONY: types
types: $(INSTALLED) ## check types
	$(BIN)/mypy

.PHONY: format
format: $(INSTALLED) ## format the code and fix style problems that can be fixed automatically
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: demo
demo: $(INSTALLED) java $(if $(filter mysql kafka-to-mysql,$(SINK) $(PIPELINE)),mariadb) ## run the demo in temporary servers (SINK=mysql, delta, files or kafka; PIPELINE=wide, kafka-to-mysql or kafka-to-kafka)
	$(BIN)/python -m demo $(if $(PIPELINE),--pipeline $(PIPELINE)) $(if $(SINK),--sink $(SINK))

.PHONY: up
up: $(INSTALLED) java ## start Airflow with a demo shop and its pipeline for exploring, until Ctrl-C
	$(BIN)/python -m demo.up

torture: SECONDS ?= 120
torture: SEED ?= 1
.PHONY: torture
torture: $(INSTALLED) java ## stress a pipeline with random failures: SECONDS=n SEED=s, MODE=mirror or changelog
	$(BIN)/python -m tests.torture --seconds $(SECONDS) --seed $(SEED) $(if $(MODE),--mode $(MODE))

.PHONY: bench
bench: $(if $(CASE),$(INSTALLED) java,all-test-tools peers) ## run all benchmarks and write docs/benchmarks.md, which takes hours; CASE=latency for one case, RUN=streams for a part
	$(BIN)/python -m $(if $(CASE),benchmarks $(CASE) $(if $(SECONDS),--seconds $(SECONDS)),benchmarks.suite $(RUN))

# The generator has its own environment: it parses the package, and needs none of its dependencies.
DOCS := .cache/docs

$(DOCS)/.installed: docs/requirements.lock
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet -r docs/requirements.lock
	@touch $@

.PHONY: docs
docs: $(DOCS)/.installed ## build the documentation as a site in build/docs; a broken link fails
	$(DOCS)/bin/sphinx-build --fail-on-warning --keep-going --quiet -E -c docs/site -b html docs build/docs
	@echo "Open build/docs/index.html."

.PHONY: clean
clean: ## remove caches and build output, but not .venv
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .cache spark-warehouse metastore_db derby.log
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
