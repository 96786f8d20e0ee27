//! Which units policies are told of.

use super::*;
use crate::dispatch::service::{Looked, Service};
use tally_engine::EndedUnits;

/// What a look found, to be kept.
#[derive(Debug, Default, PartialEq)]
struct Found {
    begins_anew: bool,
    ended: Option<Vec<EndedUnits>>,
    began: Option<OpenUnit>,
}

fn begin(client: &Client, identity: usize, kind: Kind, began_ns: u64) {
    client.region.marks.begin(identity, began_ns, What::marked(kind, None).pack());
}

fn end(client: &Client, identity: usize, kind: Kind, began_ns: u64, ended_ns: u64) {
    client.ended(kind, None, began_ns, ended_ns);
    client.region.marks.free(identity);
}

/// Two tokens in a request, as an eager server marks them.
#[test]
fn marked_tokens_with_an_objective_are_the_units_of_policies() {
    let mut client = Client::new();
    let mut service = Service::new(None, START);
    client.marks.set_tpot(START, Some(3 * MS));
    let mut look = |client: &mut Client, now_ns| {
        client.read(now_ns);
        let Looked { begins_anew, ended, began } = service.look(now_ns, &client.marks);
        Found { begins_anew, ended: ended.map(<[_]>::to_vec), began }
    };
    let unit = |since_ns, is_token| Some(OpenUnit { since_ns, is_token });
    let request = |took_ns| Some(vec![EndedUnits { units: 1, took_ns, is_token: false }]);
    let token = |took_ns| Some(vec![EndedUnits { units: 1, took_ns, is_token: true }]);
    begin(&client, 1, Kind::Request, START + MS);
    assert_eq!(look(&mut client, START + MS).began, unit(START + MS, false));
    begin(&client, 2, Kind::Token, START + 2 * MS);
    assert_eq!(look(&mut client, START + 2 * MS), Found::default(), "it may be the only one");
    end(&client, 2, Kind::Token, START + 2 * MS, START + 4 * MS);
    let looked = look(&mut client, START + 4 * MS);
    assert_eq!((looked.begins_anew, looked.ended), (true, token(2 * MS)));
    assert_eq!(looked.began, unit(START + MS, false), "the request is still open");
    begin(&client, 2, Kind::Token, START + 5 * MS);
    let looked = look(&mut client, START + 5 * MS);
    assert_eq!((looked.ended, looked.began), (Some(vec![]), unit(START + 5 * MS, true)));
    // The next one in the same pass, and then one that ends with the request.
    end(&client, 2, Kind::Token, START + 5 * MS, START + 6 * MS);
    begin(&client, 2, Kind::Token, START + 6 * MS);
    let looked = look(&mut client, START + 6 * MS);
    assert_eq!((looked.ended, looked.began), (token(MS), unit(START + 6 * MS, true)));
    end(&client, 2, Kind::Token, START + 6 * MS, START + 9 * MS);
    end(&client, 1, Kind::Request, START + MS, START + 9 * MS);
    assert_eq!(
        look(&mut client, START + 9 * MS),
        Found { ended: token(3 * MS), ..Found::default() }
    );
    // Requests without tokens are none, until the program is taken to make no more.
    let mut at_ns = START + 9 * MS + MS / 2;
    for n in 1..=TOKEN_REQUESTS {
        begin(&client, 1, Kind::Request, at_ns);
        look(&mut client, at_ns);
        end(&client, 1, Kind::Request, at_ns, at_ns + 1_000);
        let looked = look(&mut client, at_ns + 1_000);
        let is_last = n == TOKEN_REQUESTS - 1;
        assert_eq!(looked.begins_anew, is_last, "{n}");
        assert_eq!(
            looked.ended,
            if n >= TOKEN_REQUESTS - 1 { request(1_000) } else { Some(vec![]) }
        );
        at_ns += 2_000;
    }
    end(&client, 2, Kind::Token, at_ns, at_ns + 1_000);
    assert!(look(&mut client, at_ns + 1_000).begins_anew, "it makes some again");
    // Without an objective, as before.
    begin(&client, 1, Kind::Request, START + 10 * MS);
    look(&mut client, START + 10 * MS);
    end(&client, 1, Kind::Request, START + 10 * MS, START + 11 * MS);
    assert_eq!(look(&mut client, START + 11 * MS).ended, Some(vec![]), "a request is none");
    client.marks.set_tpot(START + 11 * MS, None);
    begin(&client, 1, Kind::Request, START + 12 * MS);
    begin(&client, 2, Kind::Token, START + 12 * MS);
    assert_eq!(look(&mut client, START + 12 * MS).began, unit(START + 12 * MS, false));
    end(&client, 2, Kind::Token, START + 12 * MS, START + 13 * MS);
    end(&client, 1, Kind::Request, START + 12 * MS, START + 14 * MS);
    assert_eq!(look(&mut client, START + 14 * MS).ended, request(2 * MS));
    assert_eq!(service.numbers().requests, u64::from(TOKEN_REQUESTS) + 3);
    let tokens = client.numbers(START + 14 * MS).tokens;
    assert_eq!((tokens.count, tokens.within), (5, 4), "that without an objective keeps none");
}

/// Also if it began and ended between two looks.
#[test]
fn a_unit_that_began_with_a_graph_is_one_of_tokens() {
    let mut client = Client::new();
    let mut service = Service::new(None, START);
    client.marks.set_tpot(START, Some(3 * MS));
    for (n, is_token) in [true, false].into_iter().enumerate() {
        let begin_ns = START + n as u64 * 10 * MS;
        let began_ns = theirs::began_with_ns(begin_ns, is_token);
        let what = What::stream(theirs::Graphs { count: 1, after_ns: 0 }).pack();
        let stated = Stated { began_ns, ended_ns: begin_ns + MS, what };
        assert!(client.region.marks.publish(0, stated).is_some());
        client.read(begin_ns + MS);
        let ended = [EndedUnits { units: 1, took_ns: MS, is_token }];
        assert_eq!(service.look(begin_ns + MS, &client.marks).ended, Some(&ended[..]));
    }
}
