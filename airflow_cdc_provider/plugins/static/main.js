// The page CDC and the tab of the same name on each Dag. Airflow imports this module and renders `AirflowPlugin`.

import { ChakraUI, React, ReactRouterDOM, h, send, usePolled, useWidth } from "./host.js";
import { Detail } from "./detail.js";
import { PipelineList } from "./list.js";
import { Nothing, Problem, Prose, Trail } from "./parts.js";

const { Box, Flex, Heading, Link, Spinner } = ChakraUI;
const { useEffect, useState } = React;

const SECONDS = 10;
const NARROW = 760;

/** Tests whether a pipeline belongs to a Dag: it is the Dag's own, its default, or a parameter of a recent run. */
function useIsOfDag(dagId) {
  const [files, setFiles] = useState([]);
  useEffect(() => {
    if (!dagId) return;
    const path = `api/v2/dags/${encodeURIComponent(dagId)}`;
    Promise.all([send("GET", `${path}/details`), send("GET", `${path}/dagRuns?limit=100&order_by=-run_after`)]).then(
      ([{ params }, { dag_runs: runs }]) => setFiles([params?.pipeline?.value, ...runs.map(({ conf }) => conf?.pipeline)]),
      () => setFiles([]),
    );
  }, [dagId]);
  return (pipeline) => !dagId || pipeline.dag_id === dagId || files.includes(pipeline.file);
}

function Page({ dagId }) {
  const { value, error } = usePolled("cdc/api/pipelines", SECONDS);
  const isOfDag = useIsOfDag(dagId);
  const [search] = ReactRouterDOM.useSearchParams();
  const [ref, width] = useWidth();
  const pipelines = value?.pipelines.filter(isOfDag);
  const name = search.get("pipeline") ?? (pipelines?.length === 1 ? pipelines[0].name : null);
  // The frame's scrollbar must not change the width, because the width determines whether there is a scrollbar.
  return h(
    Box,
    { "data-cdc": true, height: "100%", overflowX: "hidden", overflowY: "auto", p: width && width < NARROW ? 3 : 5, ref, scrollbarGutter: "stable" },
    name
      ? h(Detail, { key: name, name, trail: pipelines?.length === 1 ? null : h(Trail, { links: [["All pipelines", ""]], name }) })
      : h(All, { dagId, error, narrow: width < NARROW, pipelines, value }),
  );
}

function All({ dagId, error, narrow, pipelines, value }) {
  return h(
    React.Fragment,
    null,
    !dagId && h(Heading, { as: "h1", mb: 3, size: "xl" }, "Change data capture"),
    error && h(Problem, { error, status: value ? "warning" : "error", title: value ? "The server does not answer; the data shown may be outdated" : "The pipelines cannot be shown" }),
    pipelines === undefined
      ? !error && h(Flex, { justify: "center", p: 10 }, h(Spinner, { "aria-label": "Loading" }))
      : pipelines.length === 0
        ? dagId
          ? h(Nothing, { title: "This Dag runs no pipeline." }, h(Link, { asChild: true, color: "fg.info" }, h(ReactRouterDOM.Link, { to: "/plugin/cdc" }, "All pipelines")))
          : h(Empty, { place: value.place })
        : h(PipelineList, { narrow, now: value.now, pipelines, to: (pipeline) => ({ search: `?pipeline=${encodeURIComponent(pipeline.name)}` }) }),
  );
}

const Empty = ({ place }) =>
  h(
    Nothing,
    { title: "No pipelines yet" },
    h(Prose, { text: `Put a pipeline file into \`${place}\`, where the API server looks for them, or set \`[airflow_cdc] pipelines\` to the location of your files. Then trigger the Dag \`cdc_pipeline\` with the path of the file.` }),
    h(
      Box,
      { as: "pre", bg: "bg.muted", borderRadius: "md", fontSize: "xs", mt: 4, p: 3, textAlign: "left", whiteSpace: "pre-wrap" },
      "pipeline: shop\nsource:\n  conn_id: shop_pg\n  tables: [public.orders]\nsink:\n  conn_id: warehouse_pg\nstate: file:///var/lib/airflow-cdc/shop",
    ),
  );

globalThis.AirflowPlugin = Page;
