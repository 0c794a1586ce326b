import java.io.FileReader;
import java.util.Properties;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.restartstrategy.RestartStrategies;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.cdc.connectors.base.options.StartupOptions;
import org.apache.flink.cdc.connectors.postgres.source.PostgresSourceBuilder.PostgresIncrementalSource;
import org.apache.flink.cdc.debezium.DebeziumDeserializationSchema;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.sink.SinkFunction;
import org.apache.flink.util.Collector;
import org.apache.kafka.connect.data.Struct;
import org.apache.kafka.connect.source.SourceRecord;

/** Counts the changes that Flink's CDC source delivers, in a cluster within this JVM, and sums up their keys. */
public class FlinkCounter {
    /** Takes a file of properties, and the number of changes to report after; keeps running afterwards. */
    public static void main(String[] args) throws Exception {
        var given = new Properties();
        try (var file = new FileReader(args[0])) {
            given.load(file);
        }
        var debezium = new Properties();
        debezium.setProperty("publication.name", given.getProperty("publication"));
        debezium.setProperty("publication.autocreate.mode", "disabled");
        var source = PostgresIncrementalSource.<Long>builder()
            .hostname(given.getProperty("host"))
            .port(Integer.parseInt(given.getProperty("port")))
            .database(given.getProperty("database"))
            .schemaList("public")
            .tableList("public\\..*")
            .username(given.getProperty("user"))
            .password("none")
            .slotName(given.getProperty("slot"))
            .decodingPluginName("pgoutput")
            .startupOptions(StartupOptions.committed())
            .debeziumProperties(debezium)
            .deserializer(new Keys())
            .build();
        var flink = StreamExecutionEnvironment.createLocalEnvironment(1);
        flink.setRestartStrategy(RestartStrategies.noRestart());
        flink.enableCheckpointing(10_000);
        flink.fromSource(source, WatermarkStrategy.noWatermarks(), "changes").addSink(new Count(Long.parseLong(args[1])));
        System.out.println("begins");
        flink.execute();
    }

    private static class Keys implements DebeziumDeserializationSchema<Long> {
        @Override
        public void deserialize(SourceRecord change, Collector<Long> out) {
            out.collect(((Struct) change.key()).getInt64("id"));
        }

        @Override
        public TypeInformation<Long> getProducedType() {
            return Types.LONG;
        }
    }

    private static class Count implements SinkFunction<Long> {
        private final long wanted;
        private long count = 0;
        private long keys = 0;

        private Count(long wanted) {
            this.wanted = wanted;
        }

        @Override
        public void invoke(Long key, Context context) {
            keys += key;
            count++;
            if (count == wanted) {
                System.out.println(count + " " + keys);
            }
        }
    }
}
