import io.debezium.embedded.Connect;
import io.debezium.engine.ChangeEvent;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.format.Json;
import io.debezium.engine.format.SerializationFormat;
import java.io.FileReader;
import java.io.IOException;
import java.util.Arrays;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import java.util.function.ToLongFunction;
import org.apache.kafka.connect.data.Struct;
import org.apache.kafka.connect.source.SourceRecord;

/** Counts the changes that Debezium's engine delivers, and sums up their keys. */
public class DebeziumCounter {
    private final long wanted;
    private final CountDownLatch told = new CountDownLatch(1);
    private long count = 0;
    private long keys = 0;
    private volatile boolean closing = false;

    private DebeziumCounter(long wanted) {
        this.wanted = wanted;
    }

    /**
     * Takes a file of the engine's properties, "json" or "count", the number of changes to report after, and slots.
     * Reads the slots one after the other, each with its own engine, and then waits.
     */
    public static void main(String[] args) throws Exception {
        var properties = new Properties();
        try (var file = new FileReader(args[0])) {
            properties.load(file);
        }
        for (var slot : Arrays.asList(args).subList(3, args.length)) {
            properties.setProperty("slot.name", slot);
            var counter = new DebeziumCounter(Long.parseLong(args[2]));
            var last = slot.equals(args[args.length - 1]);
            if (args[1].equals("json")) {
                counter.run(Json.class, properties, DebeziumCounter::keyOfJson, last);
            } else {
                counter.run(Connect.class, properties, event -> ((Struct) event.value().key()).getInt64("id"), last);
            }
        }
        Thread.sleep(Long.MAX_VALUE);
    }

    private static long keyOfJson(ChangeEvent<String, String> event) {
        var key = event.key(); // {"id":1}
        return Long.parseLong(key.substring(key.indexOf(':') + 1, key.length() - 1).strip());
    }

    /** Returns after the report; the engine of the last slot keeps running. */
    private <R> void run(
            Class<? extends SerializationFormat<R>> format,
            Properties properties,
            ToLongFunction<ChangeEvent<R, R>> keyOf,
            boolean last) throws Exception {
        var engine = DebeziumEngine.create(format)
            .using(properties)
            .notifying((events, committer) -> {
                for (var event : events) {
                    if (!event.destination().endsWith(".message")) { // skip markers in the log
                        keys += keyOf.applyAsLong(event);
                        count++;
                    }
                    committer.markProcessed(event);
                }
                committer.markBatchFinished();
                if (count >= wanted && told.getCount() > 0) {
                    System.out.println(count + " " + keys);
                    told.countDown();
                }
            })
            .using((success, message, error) -> {
                if (closing) {
                    return;
                }
                System.err.println(message);
                if (error != null) {
                    error.printStackTrace();
                }
                Runtime.getRuntime().halt(success ? 0 : 1);
            })
            .build();
        System.out.println("begins");
        new Thread(engine).start();
        told.await();
        if (!last) {
            closing = true;
            try {
                engine.close();
            } catch (IOException | IllegalStateException e) { // otherwise the engine's threads would outlive main
                e.printStackTrace();
                Runtime.getRuntime().halt(1);
            }
        }
    }
}
