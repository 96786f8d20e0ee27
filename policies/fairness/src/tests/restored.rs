//! Whatever a saved state claims, what a client suffers by it ends after a few rounds.

use super::*;

/// Usage of each client before the reload: what a state that claims none would have it pay for at once.
const USED: u64 = 3_600 * SECOND;
/// Time of the reload.
const RELOAD: u64 = 2 * USED;

/// A line for the round: whether one launches at a time, the owner, what is left, when all were looked at. Whatever
/// else it says is the most that a number can be.
fn round(turn: u64, owner: u64, left: u64, seen: u64) -> String {
    let max = u64::MAX;
    let more = format!("{max} {max} {max} {max} {max} 1 {max} {max}");
    format!("round {TURN} {turn} {owner} {left} {left} {left} 1 {seen} {max} {more}\n")
}

/// A line for a member: its credit, lost time, usage, whether it is backlogged, and when it last was.
fn member(id: usize, credit: i64, lost: i64, charged: u64, backlogged: u8, active: u64) -> String {
    let (credit, lost) = (credit.cast_unsigned(), lost.cast_unsigned());
    let max = u64::MAX;
    format!(
        "member {id} {credit} {lost} 1 {charged} 0 {backlogged} {backlogged} {active} 1 {max} {max} {max} 1 {max}\n"
    )
}

/// After a reload with these lines, a second in which all programs launch as they may.
fn restored(rounds: Rounds, lines: &str, programs: &[Program]) -> Bench {
    let rounds = rounds.after(RELOAD, SavedRounds::read(lines));
    let from_the_reload = |program: &Program| Program { works_ns: (RELOAD, u64::MAX), ..*program };
    let programs: Vec<Program> = programs.iter().map(from_the_reload).collect();
    let mut bench = Bench::new(rounds, &programs);
    (bench.now_ns, bench.gpu_free_ns) = (RELOAD, RELOAD);
    bench.states.iter_mut().for_each(|state| state.charged_ns = USED);
    bench.run_until(RELOAD + SECOND);
    bench
}

/// Lines for client 0 with the extremes of each number.
fn worst_members() -> Vec<String> {
    let mut lines = Vec::new();
    for credit in [i64::MIN, i64::MAX] {
        for lost in [i64::MIN, i64::MAX] {
            for charged in [0, USED, u64::MAX] {
                for (backlogged, active) in [(0, u64::MAX), (1, 0)] {
                    lines.push(member(0, credit, lost, charged, backlogged, active));
                }
            }
        }
    }
    lines
}

#[test]
fn no_saved_state_starves_a_client() {
    for rounds in both() {
        let turn = u64::from(rounds.one_at_a_time);
        for (left, seen) in [(0, 0), (u64::MAX, u64::MAX), (u64::MAX, 0)] {
            for owner in [0, 1] {
                let round = round(turn, owner, left, seen);
                for victim in worst_members() {
                    let other = member(1, i64::MAX, i64::MAX, u64::MAX, 1, u64::MAX);
                    let lines = format!("{round}{victim}{other}");
                    let programs = [ahead(1, 200 * US), ahead(1, 200 * US)];
                    let bench = restored(rounds.clone(), &lines, &programs);
                    let had_ns = bench.states[0].charged_ns - USED;
                    // Half of a second, less a few rounds.
                    assert!(had_ns > 330 * MS, "{had_ns}: {lines}");
                    let wait_ns = bench.states[0].longest_wait_ns;
                    assert!(wait_ns < 500 * MS, "{wait_ns}: {lines}");
                }
            }
        }
    }
}

#[test]
fn saved_clients_that_are_gone_leave_their_places_to_others() {
    let equal = member(0, 0, 0, 0, 0, 0).repeat(MEMBERS_MAX);
    let gone: String = (100..100 + MEMBERS_MAX).map(|id| member(id, 0, 0, 0, 0, 0)).collect();
    for rounds in both() {
        for members in [&equal, &gone] {
            let lines = round(rounds.one_at_a_time.into(), 100, 0, 0) + members;
            let programs = [ahead(3, 200 * US), ahead(1, 200 * US)];
            let bench = restored(rounds.clone(), &lines, &programs);
            let had_ns = bench.states.iter().map(|state| state.charged_ns - USED);
            let [heavy, light] = had_ns.collect::<Vec<_>>()[..] else { panic!() };
            assert!((2 * light..5 * light).contains(&heavy), "{heavy} {light}");
        }
    }
}

#[test]
fn restored_numbers_are_bounded_by_a_few_rounds() {
    for rounds in both() {
        let turn = u64::from(rounds.one_at_a_time);
        let max = u64::MAX;
        let lines = format!(
            "{}{}{}",
            round(turn, 0, max, max),
            member(0, i64::MIN, i64::MIN, 0, 1, max),
            member(1, i64::MAX, i64::MAX, max, 1, max)
        );
        let mut rounds = rounds.after(RELOAD, SavedRounds::read(&lines));
        (0..2).for_each(|id| rounds.joined(&client(id, BestEffort)));
        let check = |rounds: &Rounds| {
            let turn_ns = if rounds.one_at_a_time { TURN } else { LONGEST * LONGEST_NS_MAX };
            let wall_ns = WALL * 2 * turn_ns;
            let (debt_ns, lost_ns) = (4 * turn_ns as i64, 4 * wall_ns as i64);
            for member in &rounds.members {
                assert!((-debt_ns..=turn_ns as i64).contains(&member.credit_ns), "{member:?}");
                assert!((-lost_ns..=lost_ns).contains(&member.lost_ns), "{member:?}");
                assert!(member.active_ns <= RELOAD, "{member:?}");
            }
            assert!(rounds.left_ns <= wall_ns && rounds.drain_ns <= DRAIN * wall_ns);
            assert!(rounds.active <= MEMBERS_MAX && rounds.idle_look_ns <= RELOAD + IDLE_LOOK_NS);
            assert!(rounds.asked_until_ns <= RELOAD + TURN);
            assert!(rounds.seen_ns <= RELOAD && rounds.patience_ns <= PATIENCE_NS_MAX);
        };
        check(&rounds);
        assert!(rounds.members.iter().all(|member| member.is_restored));
        let state = |id| ClientState { charged_ns: USED, ..client_state(id, BestEffort) };
        set_clients([0, 1].map(state).into());
        rounds.look(&Launch { now_ns: RELOAD, ..launch() });
        check(&rounds);
        assert!(rounds.members.iter().all(|member| !member.is_restored), "from then on as usual");
    }
}
