import io.debezium.embedded.Connect;
import io.debezium.engine.ChangeEvent;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.format.Json;
import io.debezium.engine.format.SerializationFormat;
import java.io.FileReader;
import java.util.Properties;
import java.util.function.ToLongFunction;
import org.apache.kafka.connect.data.Struct;
import org.apache.kafka.connect.source.SourceRecord;

/** Counts what Debezium's engine brings of tables, and sums their keys up. */
public class DebeziumCounter {
    private static long count = 0;
    private static long keys = 0;

    /** Takes a file of the engine's properties, "json" or "count", and after how many changes to tell; then it waits. */
    public static void main(String[] args) throws Exception {
        var properties = new Properties();
        try (var file = new FileReader(args[0])) {
            properties.load(file);
        }
        var wanted = Long.parseLong(args[2]);
        if (args[1].equals("json")) {
            run(Json.class, properties, wanted, DebeziumCounter::keyOfJson);
        } else {
            run(Connect.class, properties, wanted, event -> ((Struct) event.value().key()).getInt64("id"));
        }
    }

    private static long keyOfJson(ChangeEvent<String, String> event) {
        var key = event.key(); // {"id":1}
        return Long.parseLong(key.substring(key.indexOf(':') + 1, key.length() - 1).strip());
    }

    private static <R> void run(
            Class<? extends SerializationFormat<R>> format,
            Properties properties,
            long wanted,
            ToLongFunction<ChangeEvent<R, R>> keyOf) throws Exception {
        var engine = DebeziumEngine.create(format)
            .using(properties)
            .notifying((events, committer) -> {
                for (var event : events) {
                    if (!event.destination().endsWith(".message")) { // no marker in the log
                        keys += keyOf.applyAsLong(event);
                        count++;
                    }
                    committer.markProcessed(event);
                }
                committer.markBatchFinished();
                if (count >= wanted) {
                    System.out.println(count + " " + keys);
                }
            })
            .using((success, message, error) -> {
                System.err.println(message);
                if (error != null) {
                    error.printStackTrace();
                }
                Runtime.getRuntime().halt(success ? 0 : 1);
            })
            .build();
        System.out.println("begins");
        new Thread(engine).start();
        Thread.sleep(Long.MAX_VALUE);
    }
}
