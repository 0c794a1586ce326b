"""Objects of others at target tables: reported before anything is written, and repaired by the remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import pytest

from airflow_cdc_provider.engine.commands.checks import preflight
from airflow_cdc_provider.engine.core.errors import Refused
from airflow_cdc_provider.engine.core.findings import Finding
from tests.conftest import Databases
from tests.support.pipelines import PipelineUnderTest

Mode = Literal["mirror", "changelog"]

MADE = "CREATE TABLE {t} (id int PRIMARY KEY, v text, n int)"
LOG = (
    'CREATE TABLE {t} (id int, v text, n int, _op "char" NOT NULL, _commit_lsn pg_lsn NOT NULL, _seq bigint NOT NULL,'
    " _xid bigint, _commit_ts timestamptz, _before jsonb, _unchanged text[])"
)
# Statements at the target, and the expected message.
MIRROR = {
    "insert_rule": (f"{MADE}; CREATE RULE r AS ON INSERT TO {{t}} DO ALSO SELECT 1", "has the rule r,"),
    "update_rule": (f"{MADE}; CREATE RULE r AS ON UPDATE TO {{t}} DO INSTEAD NOTHING", "has the rule r,"),
    "delete_rule": (f"{MADE}; CREATE RULE r AS ON DELETE TO {{t}} DO INSTEAD NOTHING", "has the rule r,"),
    "disabled_rule": (
        f"{MADE}; CREATE RULE r AS ON UPDATE TO {{t}} DO ALSO SELECT 1; ALTER TABLE {{t}} DISABLE RULE r",
        "has the rule r,",
    ),
    "generated": (
        "CREATE TABLE {t} (id int PRIMARY KEY, v text GENERATED ALWAYS AS ('gen') STORED, n int)",
        "generates the column v",
    ),
    "demanding": (f"{MADE}; ALTER TABLE {{t}} ADD theirs int NOT NULL", "requires values in the column theirs"),
    "demanding_domain": (
        f"CREATE DOMAIN filled AS int CHECK (VALUE IS NOT NULL); {MADE}; ALTER TABLE {{t}} ADD theirs filled",
        "theirs of the domain public.filled, which forbids NULL",
    ),
    "viewed": (
        "CREATE VIEW {t} AS SELECT 1 AS id, ''::text AS v, 1 AS n WHERE false; GRANT ALL ON {t} TO cdc",
        "is a view",
    ),
    "typed": ("CREATE DOMAIN {t} AS int", "a type of that name exists"),
    "unlogged": (MADE.replace("TABLE", "UNLOGGED TABLE"), "is not logged"),
    "parted": (f"{MADE} PARTITION BY RANGE (id)", "has no partition"),
    "parent": (f"{MADE}; CREATE TABLE child () INHERITS ({{t}})", "has the inheritance child public.child"),
    "deferred": (f"{MADE} ; ALTER TABLE {{t}} DROP CONSTRAINT {{t}}_pkey, ADD UNIQUE (id) DEFERRABLE", "is deferrable"),
    "partial": (
        "CREATE TABLE {t} (id int NOT NULL, v text, n int); CREATE UNIQUE INDEX ON {t} (id) WHERE id > 0",
        "is partial",
    ),
    "published": (
        "CREATE TABLE {t} (id int NOT NULL UNIQUE, v text, n int); CREATE PUBLICATION pub FOR TABLE {t}",
        "is published with updates or deletes by pub, without a replica identity",
    ),
}
CHANGELOG = {
    "rule": (f"{LOG}; CREATE RULE r AS ON INSERT TO {{t}} DO INSTEAD NOTHING", "has the rule r,"),
    "not_null": (f"{LOG}; ALTER TABLE {{t}} ALTER v SET NOT NULL", "requires values in the column v"),
    "identity": (
        f"{LOG}; ALTER TABLE {{t}} ALTER n SET NOT NULL, ALTER n ADD GENERATED ALWAYS AS IDENTITY",
        "column n",
    ),
    "not_all": (f"{LOG}; ALTER TABLE {{t}} ALTER _xid SET NOT NULL", "requires values in the column _xid"),
    "keyed": (f"{LOG}; ALTER TABLE {{t}} ADD PRIMARY KEY (id)", "unique index public.keyed_pkey"),
    "domain": (
        f"CREATE DOMAIN filled AS text CHECK (VALUE IS NOT NULL); {LOG}; ALTER TABLE {{t}} ALTER v TYPE filled",
        "v of the domain public.filled, which forbids NULL",
    ),
}
# No single statement fits all of these cases.
BY_HAND = {
    "viewed": "DROP VIEW viewed",
    "parted": "CREATE TABLE part PARTITION OF parted DEFAULT",
    "demanding_domain": "ALTER TABLE demanding_domain DROP theirs",
    "domain": "ALTER TABLE domain ALTER v TYPE text",
}


def find(pipeline: PipelineUnderTest, check: str) -> Finding:
    (found,) = (finding for finding in preflight(pipeline.pipeline) if finding.check == check)
    return found


@pytest.mark.parametrize("mode", ["mirror", "changelog"])
def test_what_stands_in_the_way_is_named_and_mended(databases: Databases, tmp_path: Path, mode: Mode) -> None:
    cases = MIRROR if mode == "mirror" else CHANGELOG
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.*"], sink={"mode": mode})
    for name, (made, _) in cases.items():
        pipeline.source(MADE.format(t=name), f"INSERT INTO {name} VALUES (1, 'x', 1), (2, NULL, 2)")
        pipeline.target(*made.format(t=name).split("; "))
    error = find(pipeline, "target obstacles").error
    assert error is not None
    for name, (_, said) in cases.items():
        assert re.search(rf"public\.{name} [^;]*{re.escape(said)}", error.message) or said.startswith("is "), name
        assert said in error.message
    with pytest.raises(Refused, match="the target table"):
        pipeline.provision()
    assert pipeline.target_rows("SELECT to_regnamespace('airflow_cdc')::text") == [(None,)]
    assert pipeline.source_rows(f"SELECT FROM pg_replication_slots WHERE slot_name = '{pipeline.name}'") == []
    pipeline.target(*re.findall(r"(?:ALTER|DROP) [A-Z]+ [^;]*;", error.solution))
    pipeline.target(*(statement for name, statement in BY_HAND.items() if name in cases))
    pipeline.provision()
    pipeline.copy_tables()
    for name in cases:
        pipeline.source(f"UPDATE {name} SET v = 'y' WHERE id = 1", f"DELETE FROM {name} WHERE id = 2")
    pipeline.apply()
    pipeline.assert_verified()


def test_each_obstacle_is_refused_by_the_sink_itself(databases: Databases, tmp_path: Path) -> None:
    """An obstacle appears between preflight and provisioning, or before tables are re-read."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.t"])
    pipeline.source(MADE.format(t="t"), "INSERT INTO t VALUES (1, 'x', 1)")
    pipeline.provision()
    pipeline.copy()
    pipeline.target("CREATE RULE r AS ON DELETE TO t DO INSTEAD NOTHING")
    pipeline.source("UPDATE t SET n = 2")
    error = find(pipeline, "target obstacles").error
    assert error is not None
    with pytest.raises(Refused, match="has the rule r"):
        pipeline.provision()


def test_what_may_stand_in_the_way_is_warned_of(databases: Databases, tmp_path: Path) -> None:
    """So are objects that can run code as the role that writes."""
    pipeline = PipelineUnderTest(tmp_path, databases, ["public.*"])
    pipeline.source(*(MADE.format(t=name) for name in ("plain", "t", "parted", "referred")))
    pipeline.target(
        f"{MADE.format(t='t')}",
        "CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
        "CREATE TRIGGER swallow BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION nothing()",
        "ALTER TABLE t ADD UNIQUE (v), ALTER n SET NOT NULL",
        f"{MADE.format(t='parted')} PARTITION BY LIST (id)",
        "CREATE TABLE one PARTITION OF parted FOR VALUES IN (1)",
        MADE.format(t="referred"),
        "ALTER TABLE t ADD FOREIGN KEY (n) REFERENCES referred",
    )
    code, constraints = find(pipeline, "target code"), find(pipeline, "target constraints")
    assert code.warning
    assert "public.t has the trigger swallow (public.nothing)" in code.message
    assert "public.t belongs to role app" in code.message
    assert "plain" not in code.message
    assert constraints.warning
    for said in ("t_v_key, t_n_fkey of public.t", "parted has no DEFAULT partition", "public.t forbids NULL in n"):
        assert said in constraints.message
    pipeline.provision()
