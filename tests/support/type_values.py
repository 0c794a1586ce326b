"""Values of every type that Postgres replicates."""

from __future__ import annotations

from collections.abc import Sequence

PLANES = "".join(chr(plane << 16 | low) for plane in range(17) for low in (0x21, 0x1234, 0xFFFD, 0xFFFF))


CONTROLS = "".join(map(chr, [*range(1, 32), 0x7F, 0x85, 0xA0, 0x2028, 0xFEFF]))


STRANGE = ["", " ", "NULL", "\\N", "\\.", '"', "''", "a\r\nb\n\\.\nc", "{},;", "$1 %s %% {0} \\u0041", PLANES, CONTROLS]


FLOATS = ["NaN", "Infinity", "-Infinity", "-0", "0.1"]


DIGITS = "1234567890" * 100


TIMES = ["infinity", "-infinity", "0044-03-15 BC", "2000-02-29"]


# By type in SQL: inputs that its input function accepts, on every version unless VERSIONS differs.
VALUES: dict[str, Sequence[str]] = {
    "bool": ["t", "f"],
    "int2": ["-32768", "32767"],
    "int4": ["-2147483648", "2147483647"],
    "int8": ["-9223372036854775808", "9223372036854775807"],
    "float4": [*FLOATS, "1e-45", "3.4028235e38"],
    "float8": [*FLOATS, "5e-324", "1.7976931348623157e308"],
    "numeric": ["NaN", "Infinity", "-Infinity", DIGITS, f"-0.{DIGITS}", "1e131071", "1e-16383", "1.500", "0.00"],
    "numeric(1000,500)": ["9" * 500 + "." + "9" * 500, "NaN", "0"],
    "money": ["-92233720368547758.08", "92233720368547758.07", "0"],
    "oid": ["0", "4294967295"],
    "text": STRANGE,
    "varchar": STRANGE,
    "varchar(5)": ["", "a    ", "äöü€𝄞"],
    "bpchar": ["", "a  ", "\t"],
    "char": ["", "x"],
    "char(5)": ["", "a", "äöü€𝄞", " a"],
    "name": ["", 'a"\\', "ä" * 31 + "x"],
    '"char"': ["", "a", '"', ",", "\\", " "],
    "bytea": ["", "\\x" + bytes(range(256)).hex(), "\\x00"],
    "bit": ["1", "0"],
    "bit(9)": ["000000001"],
    "varbit": ["", "1" * 100, "0"],
    "varbit(3)": ["", "101"],
    "date": [*TIMES, "4714-11-24 BC", "5874897-12-31"],
    "time": ["00:00", "24:00", "23:59:59.999999"],
    "time(2)": ["23:59:59.99"],
    "timetz": ["24:00:00+15:59:59", "00:00:00-15:59:59"],
    "timestamp": [*TIMES, "4714-11-24 00:00 BC", "294276-12-31 23:59:59.999999"],
    "timestamp(0)": ["1999-12-31 23:59:59.6"],
    "timestamptz": [
        *TIMES,
        "4714-11-24 00:00+00 BC",
        "294276-12-31 23:59:59.999999+00",
        "2021-10-31 02:30 Europe/Berlin",
    ],
    "interval": ["-178000000 years", "178000000 years", "1 mon -2 days 03:04:05.678901", "-00:00:00.000001", "0"],
    "interval year to month": ["-1-2"],
    "interval second(3)": ["61.2345"],
    "uuid": ["00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"],
    "json": ['{"a": 1,  "a": 2}', '"\\u0000"', "null", "[1e400]", '"\\ud83d\\ude00"', '"a\\"b"'],
    "jsonb": ['{"\\"": "\\\\ \\n \\u2028 \\ud83d\\ude00"}', "1e400", "null", '""', "[[], {}, -0.0]"],
    "jsonpath": ['$."a\\"b"[*] ? (@.x > 1)', "strict $"],
    "inet": ["192.168.0.1/24", "::1", "::ffff:1.2.3.4/96", "0.0.0.0/0", "10.0.0.1"],
    "cidr": ["10.0.0.0/8", "::/0", "192.168.1.1/32"],
    "macaddr": ["00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff"],
    "macaddr8": ["00:00:00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff:ff:ff"],
    "point": ["(NaN,Infinity)", "(-0,1e300)"],
    "line": ["{1,-1,0}", "{0,1,-1e300}"],
    "lseg": ["[(0,0),(1,-1)]"],
    "box": ["(2,2),(1,1)", "(Infinity,0),(0,-Infinity)"],
    "path": ["((0,0),(1,1))", "[(0.1,0)]"],
    "polygon": ["((0,0),(1,1),(1,0))"],
    "circle": ["<(0,0),0>", "<(1,2),Infinity>"],
    "tsvector": ["", "'a':1A,2B 'b''c':3 'back\\\\slash' ' ':16383"],
    "tsquery": ["", "'a':*AB & !( 'b''' | 'c' ) <-> 'd'"],
    "int4range": ["empty", "[1,3)", "(,)"],
    "int8range": ["empty", "[-9223372036854775808,9223372036854775807)"],
    "numrange": ["empty", "(-Infinity,NaN]", "[1.50,)"],
    "daterange": ["empty", "[-infinity,infinity)", "[infinity,)"],
    "tsrange": ["empty", '["0044-03-15 00:00:00 BC",infinity]'],
    "tstzrange": ["empty", '("0044-03-15 00:00:00+00 BC",)'],
    "int4multirange": ["{}", "{(,1),[3,5)}"],
    "int8multirange": ["{}", "{[1,2)}"],
    "nummultirange": ["{}", "{[1.0,1.0],(2,)}"],
    "datemultirange": ["{}", "{(,)}"],
    "tsmultirange": ["{}", '{["0044-03-15 00:00:00 BC",infinity]}'],
    "tstzmultirange": ["{}", '{(,"2000-01-01 00:00:00+00")}'],
    "pg_lsn": ["0/0", "FFFFFFFF/FFFFFFFF"],
    "xid": ["0", "4294967295"],
    "xid8": ["0", "18446744073709551615"],
    "cid": ["0", "4294967295"],
    "tid": ["(0,0)", "(4294967295,65535)"],
    "pg_snapshot": ["10:20:10,14"],
    "txid_snapshot": ["10:20:10,14"],
    "int2vector": ["", "1 -2 3"],
    "oidvector": ["", "1 2 4294967295"],
    "refcursor": ["", 'a "cursor"'],
    "regproc": ["-", "boolin", "99999"],
    "regprocedure": ["sum(int4)", "public.only_here()"],
    "regoper": ["||/", "99999"],
    "regoperator": ["+(int4,int4)"],
    "regclass": ["pg_class", "public.only_here", "99999"],
    "regcollation": ['"C"'],
    "regconfig": ["english"],
    "regdictionary": ["simple"],
    "regnamespace": ["public", "only_here"],
    "regrole": ["postgres"],
    "regtype": ["integer[]", "public.only_here"],
    "aclitem": ["postgres=arwd/postgres"],
    "information_schema.cardinal_number": ["0", "2147483647"],
    "information_schema.character_data": ["", "ä"],
    "information_schema.sql_identifier": ["a b"],
    "information_schema.time_stamp": ["infinity"],
    "information_schema.yes_or_no": ["YES"],
    "pg_am": ['(1,"a""b",boolin,t)'],
}
