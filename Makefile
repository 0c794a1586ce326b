# Everything a developer runs, from a fresh clone: the first target that needs it builds .venv from
# requirements.lock with whatever package index pip is configured for.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Two processes leave two cores idle for more than a third of the time. Each has servers of its own; the tests of a file
# share what they start.
PROCESSES ?= 3
PYTEST = $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder --durations 10

# $(call debian-install,PACKAGE): install a package of Debian, with fresh lists when the old ones do not do.
debian-install = export DEBIAN_FRONTEND=noninteractive; \
	apt-get install -y --no-install-recommends $(1) || { apt-get update && apt-get install -y --no-install-recommends $(1); }

# Whether we may install system packages: root, on Debian or a child of it.
is-debian-root = [ "$$(id -u)" = 0 ] && [ -e /etc/debian_version ]

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(INSTALLED) java ## build .venv and check for Java (done by the others when needed)

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

# Spark takes JAVA_HOME before PATH, so that is the Java whose version counts.
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

# Some tests want collations and extensions that the wheel's Postgres lacks; without these binaries they are skipped.
.PHONY: postgres
postgres: | java
	@if compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null; then exit 0; fi; \
	if $(is-debian-root); then $(call debian-install,postgresql); exit 0; fi; \
	echo "Tests that need a full Postgres are skipped: there is none in /usr/lib/postgresql (on Debian: apt-get install postgresql)." >&2

# The MySQL sink is tested against Debian's MariaDB, as servers of the tests' own: the package's service stays off.
.PHONY: mariadb
mariadb: | java
	@if [ -x /usr/sbin/mariadbd ]; then exit 0; fi; \
	if $(is-debian-root); then \
		[ -e /usr/sbin/policy-rc.d ] || { printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d; \
			chmod +x /usr/sbin/policy-rc.d; trap 'rm -f /usr/sbin/policy-rc.d' EXIT; }; \
		$(call debian-install,mariadb-server); exit 0; \
	fi; \
	echo "Tests of the MySQL sink are skipped: there is no /usr/sbin/mariadbd (on Debian: apt-get install mariadb-server)." >&2

# The page is tested in a real browser; without one those tests are skipped.
.PHONY: chromium
chromium: | java
	@if [ -x /usr/bin/chromium ]; then exit 0; fi; \
	if $(is-debian-root); then $(call debian-install,chromium); exit 0; fi; \
	echo "Tests of the page in a browser are skipped: there is no /usr/bin/chromium (on Debian: apt-get install chromium)." >&2

# Jars that Spark does not bring, fetched once: what tests need of the packages that users name in spark.jars.packages.
.PHONY: jars
jars: $(INSTALLED) java
	@echo "Fetching the jars of Delta Lake, unless they are there."; $(BIN)/python -m tests.support.delta_spark || \
		echo "Tests of the Delta sink are skipped: its jars cannot be fetched from Maven Central." >&2

# Hadoop's small cluster for tests, which is an HDFS for those of the files sink.
.PHONY: hdfs
hdfs: $(INSTALLED) java
	@echo "Fetching the jar of Hadoop's small cluster, unless it is there."; $(BIN)/python -m tests.support.hdfs || \
		echo "Tests of files in HDFS are skipped: the jar cannot be fetched from Maven Central." >&2

# Kafka's own broker, for the tests of the Kafka sink.
.PHONY: kafka
kafka: $(INSTALLED) java
	@echo "Fetching the jars of Kafka, unless they are there."; $(BIN)/python -m tests.support.kafka_server || \
		echo "Tests against Kafka are skipped: its jars cannot be fetched from Maven Central." >&2

# What the benchmarks compare with, as far as it is tested.
.PHONY: peers
peers: $(INSTALLED) java
	@echo "Fetching the jars of Debezium, unless they are there."; $(BIN)/python -m benchmarks.peers || \
		echo "Tests of the benchmarks beside Debezium and Spark's JDBC are skipped: they need Maven Central and a JDK." >&2

.PHONY: all-test-tools
all-test-tools: $(INSTALLED) java postgres mariadb chromium jars hdfs kafka

.PHONY: test
test: all-test-tools ## run the tests (PROCESSES=n at a time, 3 by default), of long tests few cases
	$(PYTEST) --thin

.PHONY: test-thorough
test-thorough: all-test-tools peers ## run all cases of all tests, which takes more than twice as long
	$(PYTEST)

.PHONY: test-fast
test-fast: $(INSTALLED) postgres mariadb ## run the quick tests, which start neither Spark nor Airflow
	$(PYTEST) -m "not spark and not airflow and not slow"

# Debian has no MySQL but in its unstable distribution, from which it is unpacked and not installed.
test-mysql: DIRECTORY ?= /var/tmp/airflow-cdc-mysql
.PHONY: test-mysql
test-mysql: $(INSTALLED) java ## run the tests of the MySQL sink against MySQL, fetched into DIRECTORY
	MYSQLD=$$($(BIN)/python -m tests.support.mysql_server $(DIRECTORY)) $(PYTEST) tests/sinks/mysql

.PHONY: lint
lint: $(INSTALLED) ## check style, formatting, which folder imports which, and that files are short
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports setup.cfg --no-cache
	@! find airflow_cdc_provider benchmarks dags demo docs/examples local_servers -name '*.py' -exec wc -l {} + \
		| awk '$$2 != "total" && $$1 > 400 { print $$2 " has " $$1 " lines; 400 are allowed" }' | grep . >&2

.PHONY: types
types: $(INSTALLED) ## check types
	$(BIN)/mypy

.PHONY: format
format: $(INSTALLED) ## format the code and repair what can be repaired
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: demo
demo: $(INSTALLED) java $(if $(filter mysql kafka-to-mysql,$(SINK) $(PIPELINE)),mariadb) ## show it at work, all temporary (SINK=mysql, delta, files or kafka; PIPELINE=kafka-to-mysql or kafka-to-kafka)
	$(BIN)/python -m demo $(if $(PIPELINE),--pipeline $(PIPELINE)) $(if $(SINK),--sink $(SINK))

.PHONY: up
up: $(INSTALLED) java ## start Airflow with a shop and its pipeline to click around in, until Ctrl-C
	$(BIN)/python -m demo.up

torture: SECONDS ?= 120
torture: SEED ?= 1
.PHONY: torture
torture: $(INSTALLED) java ## torture a pipeline: SECONDS=n SEED=s, MODE=mirror or changelog
	$(BIN)/python -m tests.torture --seconds $(SECONDS) --seed $(SEED) $(if $(MODE),--mode $(MODE))

.PHONY: bench
bench: $(if $(CASE),$(INSTALLED) java,all-test-tools peers) ## measure all and write docs/benchmarks.md, which takes hours; CASE=latency for one case, RUN=streams for a part
	$(BIN)/python -m $(if $(CASE),benchmarks $(CASE) $(if $(SECONDS),--seconds $(SECONDS)),benchmarks.suite $(RUN))

.PHONY: clean
clean: ## remove caches and build output; .venv stays
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .cache spark-warehouse metastore_db derby.log
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
