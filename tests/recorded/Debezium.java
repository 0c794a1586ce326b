import io.debezium.engine.ChangeEvent;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.format.Json;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;

/** Prints keys and values, as its connector for Postgres and Kafka Connect's JsonConverter make them, of a table. */
public class Debezium {
    /** Takes the port, the database, decimal.handling.mode, and how many messages there will be. */
    public static void main(String[] args) throws Exception {
        var properties = new Properties();
        properties.putAll(Map.of(
            "name", "recorder",
            "connector.class", "io.debezium.connector.postgresql.PostgresConnector",
            "offset.storage", "org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
            "plugin.name", "pgoutput",
            "slot.name", "recorder",
            "snapshot.mode", "no_data",
            "topic.prefix", "shop",
            "table.include.list", "public.t",
            "converter.schemas.enable", "true",
            "decimal.handling.mode", args[2]));
        properties.putAll(Map.of(
            "database.hostname", "127.0.0.1",
            "database.port", args[0],
            "database.user", "postgres",
            "database.password", "none",
            "database.dbname", args[1]));
        var out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        var left = new CountDownLatch(Integer.parseInt(args[3]));
        var engine = DebeziumEngine.create(Json.class)
            .using(properties)
            .notifying((ChangeEvent<String, String> event) -> {
                out.println(event.key() + "\t" + event.value());
                left.countDown();
            })
            .using((success, message, error) -> {
                System.err.println(message);
                Runtime.getRuntime().halt(1);
            })
            .build();
        new Thread(engine).start();
        left.await();
        Runtime.getRuntime().halt(0);
    }
}
