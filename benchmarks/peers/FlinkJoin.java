import java.io.FileReader;
import java.util.Properties;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.table.api.TableResult;
import org.apache.flink.table.api.bridge.java.StreamTableEnvironment;

/** Executes statements of Flink SQL in a cluster within this JVM. */
public class FlinkJoin {
    /** Takes a file with the cluster's configuration, and statements, the last of which runs until it is killed. */
    public static void main(String[] args) throws Exception {
        var given = new Properties();
        try (var file = new FileReader(args[0])) {
            given.load(file);
        }
        var configuration = new Configuration();
        given.stringPropertyNames().forEach(name -> configuration.setString(name, given.getProperty(name)));
        var flink = StreamTableEnvironment.create(StreamExecutionEnvironment.createLocalEnvironment(configuration));
        TableResult last = null;
        for (int i = 1; i < args.length; i++) {
            last = flink.executeSql(args[i]);
        }
        System.out.println("begins");
        last.await();
    }
}
