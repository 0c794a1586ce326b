"""The output for people about views: their states, their comparison, and their explanation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from airflow_cdc_provider.engine.core.text_output import text_table


def _name(view: Mapping[str, Any]) -> str:
    """Return the name of a view, with its sink if there are several."""
    return f"{view['view']} in {view['sink']}" if "sink" in view else str(view["view"])


def view_states_text(views: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the states of views."""
    header = ["view", "state", "built", "as of", "queued", "anchors/unit", "ms/unit"]
    body = [
        [
            _name(view),
            view["state"],
            f"{view['built_percent']:g} %",
            view["as_of"] or "-",
            f"{view['queued']:,}",
            *("-" if view[key] is None else f"{view[key]:,}" for key in ("anchors_per_unit", "milliseconds_per_unit")),
        ]
        for view in views
    ]
    return text_table(header, body)


def view_results_text(views: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of compared views, and a line for each difference and for what was left out."""
    body = [[_name(view), f"{view['rows']:,}", "yes" if view["equal"] else "NO"] for view in views]
    lines = [text_table(["view", "rows", "equal"], body)]
    for view in views:
        lines += [
            f"{_name(view)}: {each['kind']} {json.dumps(each['key'], ensure_ascii=False)}"
            for each in view["differences"]
        ]
        left_out = [f"{view[key]:,} {text}" for key, text in _LEFT_OUT.items() if view[key]]
        if left_out:
            lines.append(f"{_name(view)}: not compared, because not computed yet: {', '.join(left_out)}.")
    return lines


_LEFT_OUT = {"queued": "queued anchors", "unbuilt": "anchors that are not built"}


def explanation_text(result: Mapping[str, Any]) -> str:
    """Return an explanation of a view as text."""
    anchor = ", ".join(f"{result['root']}.{column}" for column in result["anchor"])
    lines = [f"view {result['view']}: recomputed by the {'group' if result['grouped'] else 'key'} {anchor}"]
    lines += _tree(result["tables"], result["root"])
    if result["mirrored"]:
        if any(table["rows_per_change"] is None for table in result["tables"]):
            lines.append("Some numbers of rows are unknown: run ANALYZE on the tables of the mirror.")
        if result["missing_indexes"]:
            made = (
                "the stream creates them before it builds the view" if result["indexes"] == "create" else "create them"
            )
            lines.append(f"Missing indexes ({made}):")
            lines += [f"  {statement};" for statement in result["missing_indexes"]]
        else:
            lines.append("All indexes that it needs exist.")
    else:
        lines.append("The mirror does not exist yet, so numbers of rows and missing indexes are not known.")
    if result["refresh"]:
        lines.append(f"Changes are queued, and applied every {result['refresh']:g} seconds.")
    else:
        lines.append(f"Changes of up to {result['max_rows']:,} anchors are applied in their unit, others are queued.")
    lines.append("For the affected anchors runs:")
    lines.append(result["select"])
    return "\n".join(lines)


def _tree(tables: Sequence[Mapping[str, Any]], root: str) -> Iterator[str]:
    """Yield the tables below those that they reach the anchor over."""
    children: dict[str, list[Mapping[str, Any]]] = {}
    for table in tables:
        if len(table["path"]) > 1:
            children.setdefault(table["path"][1], []).append(table)
    by_name = {table["alias"]: table for table in tables}

    def below(name: str, mark: str, indent: str) -> Iterator[str]:
        yield f"{mark}{_line(by_name[name])}"
        found = children.get(name, [])
        for n, child in enumerate(found, start=1):
            last = n == len(found)
            yield from below(
                child["alias"], f"{indent}{'└─' if last else '├─'} ", f"{indent}{'   ' if last else '│  '}"
            )

    yield from below(root, "", "")


def _line(table: Mapping[str, Any]) -> str:
    join = {"first": "", "inner": f" joined ON {table['condition']}", "left": f" left joined ON {table['condition']}"}
    rows = table["rows_per_change"]
    cost = "" if rows is None else f"; a changed row affects about {rows:,.0f} row{'' if round(rows) == 1 else 's'}"
    return f"{table['alias']} = {table['table']}{join[table['join']]}; triggered by {', '.join(table['columns'])}{cost}"
