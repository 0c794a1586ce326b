import io.apicurio.registry.utils.converter.avro.AvroData;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import org.apache.kafka.connect.json.JsonConverter;

/** Prints the schema that Kafka Connect's AvroConverter makes of each message with a schema in JSON. */
public class Avro {
    public static void main(String[] args) throws Exception {
        var json = new JsonConverter();
        json.configure(Map.of("schemas.enable", "true"), true);
        var avro = new AvroData(1);
        var in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (var line = in.readLine(); line != null; line = in.readLine()) {
            var found = json.toConnectData("", line.getBytes(StandardCharsets.UTF_8));
            System.out.println(avro.fromConnectSchema(found.schema()));
        }
    }
}
