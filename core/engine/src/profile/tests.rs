use super::*;

#[test]
fn the_prediction_forgets_a_slow_first_launch_at_once_and_the_mean_does_not() {
    let mut p = Profile::new(KernelKey { name: "k".into(), image: 0, grid: [1; 3], block: [1; 3] });
    p.record(30_000_000);
    assert_eq!(p.predicted_ns, 30_000_000);
    p.record(500_000);
    assert_eq!(p.predicted_ns, 500_000);
    for _ in 0..10 {
        p.record(500_000);
    }
    assert_eq!(p.predicted_ns, 500_000);
    assert!(p.mean_ns > 2_000_000);
}

#[test]
fn the_prediction_follows_a_change_within_a_few_launches() {
    let mut p = Profile::new(KernelKey { name: "k".into(), image: 0, grid: [1; 3], block: [1; 3] });
    for _ in 0..100 {
        p.record(10_000);
    }
    for _ in 0..5 {
        p.record(70_000);
    }
    assert_eq!(p.predicted_ns, 70_000);
    assert_eq!(p.p99_ns(), 70_000);
}

fn known() -> (Profiles, KernelId) {
    let mut all = Profiles::default();
    let key = KernelKey { name: "k".into(), image: 1, grid: [1; 3], block: [1; 3] };
    let kernel = all.intern(&key).unwrap();
    (all, kernel)
}

#[test]
fn what_was_kept_predicts_until_enough_is_measured() {
    let (mut all, kernel) = known();
    let kept = Kept {
        count: 1_000,
        mean_ns: 210,
        predicted_ns: 200,
        p99_ns: 900,
        demand: Demand { blocks_per_sm: 2, registers: 16 },
        forms: vec![(Form::Preemptible, 0, FormStats::kept(7, 250, 40))],
        whole_only: Some("because"),
    };
    all.restore(kernel, kept.clone());
    assert!(!all.has_news(), "nothing was measured");
    let p = all.get(kernel).unwrap();
    assert_eq!((p.count, p.mean_ns, p.predicted_ns), (KEPT_COUNT_MAX, 210, 200));
    assert_eq!((p.p99_ns(), p.turnaround_ns(Form::Preemptible, 0)), (900, Some(40)));
    assert_eq!(p.transformation, Transformation::WholeOnly("because"));
    for _ in 0..5 {
        all.record(kernel, 500);
    }
    assert_eq!(all.predicted_ns(kernel), 500);
    all.restore(kernel, kept);
    assert_eq!(all.predicted_ns(kernel), 500, "a second client brings it again");
}

#[test]
fn beside_other_work_only_an_upper_bound_is_profiled() {
    let (mut all, kernel) = known();
    for ns in [900, 700, 800] {
        all.record_contended(kernel, ns);
        all.record_form_contended(kernel, Form::Sliced, 2, ns);
    }
    let p = all.get(kernel).unwrap();
    assert_eq!((p.contended, p.count, p.predicted_ns, p.mean_ns), (true, 1, 700, 700));
    assert_eq!((p.p99_ns(), p.forms[&(Form::Sliced, 2)].mean_ns), (900, 700));
    all.record(kernel, 300);
    all.record_form(kernel, Form::Sliced, 2, 320);
    let p = all.get(kernel).unwrap();
    assert_eq!((p.contended, p.count, p.predicted_ns, p.mean_ns), (false, 1, 300, 300));
    assert_eq!(p.forms[&(Form::Sliced, 2)].mean_ns, 320, "the bound is not in the mean");
    for _ in 0..100 {
        all.record_contended(kernel, 2_000);
        all.record_contended(kernel, 290);
    }
    let p = all.get(kernel).unwrap();
    assert_eq!((p.count, p.predicted_ns, p.p99_ns()), (1, 300, 300), "chance draws nothing down");
}

#[test]
fn an_upper_bound_follows_a_kernel_that_grows() {
    let (mut all, kernel) = known();
    let both = |all: &mut Profiles, ns| {
        all.record_contended(kernel, ns);
        all.record_form_contended(kernel, Form::Sliced, 2, ns);
    };
    both(&mut all, 20_000);
    for _ in 0..tally_contract::limits::RECENT_SAMPLES {
        both(&mut all, 2_000_000);
    }
    let p = all.get(kernel).unwrap();
    assert_eq!((p.predicted_ns, p.forms[&(Form::Sliced, 2)].mean_ns), (2_000_000, 2_000_000));
    assert_eq!(p.least_ever_ns, 20_000, "what counts as work");
}

#[test]
fn a_wrong_time_that_was_kept_is_put_right_by_a_few_launches() {
    for contended in [false, true] {
        let (mut all, kernel) = known();
        let (count, wrong) = (1_000, 23_000_000);
        let forms = vec![(Form::Preemptible, 0, FormStats::kept(count, wrong, 0))];
        all.restore(
            kernel,
            Kept {
                count,
                mean_ns: wrong,
                predicted_ns: wrong,
                p99_ns: wrong,
                demand: Demand::default(),
                forms,
                whole_only: None,
            },
        );
        for _ in 0..5 {
            match contended {
                true => all.record_contended(kernel, 3_000_000),
                false => all.record(kernel, 3_000_000),
            }
        }
        assert_eq!(all.predicted_ns(kernel), 3_000_000, "beside other work: {contended}");
        for _ in 0..60 {
            all.record(kernel, 3_000_000);
            all.record_form(kernel, Form::Preemptible, 0, 3_000_000);
        }
        let p = all.get(kernel).unwrap();
        assert!(p.mean_ns < 5_000_000, "{}", p.mean_ns);
        assert!(p.forms[&(Form::Preemptible, 0)].mean_ns < 5_000_000);
        assert_eq!(p.p99_ns(), 3_000_000);
    }
}

#[test]
fn news_is_told_once_and_forgetting_leaves_none() {
    let (mut all, kernel) = known();
    assert!(!all.has_news() && all.take_news(kernel).is_none());
    for state in
        [Transformation::Preparable, Transformation::WholeHere("its context is another one")]
    {
        all.set_transformation(kernel, state);
        assert!(!all.has_news(), "a state that every run finds out anew");
    }
    all.record(kernel, 5);
    all.record_form(kernel, Form::Sliced, 2, 6);
    all.set_transformation(kernel, Transformation::WholeOnly("because"));
    assert!(all.has_news());
    assert_eq!(all.take_news(kernel).unwrap().count, 1);
    assert!(!all.has_news() && all.take_news(kernel).is_none());
    all.record(kernel, 5);
    assert!(all.forget(kernel) && !all.forget(kernel + 1));
    assert!(!all.has_news());
    let p = all.get(kernel).unwrap();
    assert_eq!(
        (p.count, p.predicted_ns, p.p99_ns(), p.transformation),
        (0, 0, 0, Transformation::Unknown)
    );
    assert!(p.forms.is_empty());
    all.record(kernel, 8);
    assert_eq!((all.predicted_ns(kernel), all.get(kernel).unwrap().p99_ns()), (8, 8));
}

#[test]
fn waves_follow_the_demand_and_the_gpu() {
    let mut all = Profiles::default();
    let key = KernelKey { name: "k".into(), image: 1, grid: [6, 2, 1], block: [1; 3] };
    let kernel = all.intern(&key).unwrap();
    let seen = |all: &Profiles| {
        let view = all.get(kernel).unwrap().view();
        (view.demand.blocks_per_sm, view.demand.registers, view.waves_permille)
    };
    assert_eq!(seen(&all), (0, 0, 0));
    all.set_demand(kernel, Demand { blocks_per_sm: 2, registers: 40 });
    assert_eq!(seen(&all), (2, 40, 0), "how many SMs there are is not known yet");
    all.set_sm_count(4);
    assert_eq!(seen(&all), (2, 40, 1_500));
    all.set_demand(kernel, Demand { blocks_per_sm: 3, registers: 40 });
    assert_eq!(seen(&all), (3, 40, 1_000));
    // What was kept is older than what a client said in this run.
    let demand = Demand { blocks_per_sm: 1, registers: 1 };
    all.restore(kernel, Kept { demand, ..Kept::default() });
    assert_eq!(seen(&all), (3, 40, 1_000));
    let other = all.intern(&KernelKey { image: 2, ..key }).unwrap();
    all.restore(other, Kept { demand, ..Kept::default() });
    assert_eq!(all.get(other).unwrap().waves_permille(), 3_000);
}
