//! Who is admitted as what, and who may change things. Pure.

use crate::config::Config;
use tally_engine::policy::Class;

#[derive(Clone, Debug)]
pub struct Rules {
    high_uids: Vec<u32>,
    /// Whether `high_uids` count for users in containers, too.
    high_containers: bool,
    admin_uids: Vec<u32>,
}

impl Rules {
    /// From the configuration and the core's own user.
    pub fn new(config: &Config, own_uid: u32) -> Self {
        let mut admin_uids = config.admin.uids.clone();
        admin_uids.extend([0, own_uid]);
        let high_uids = config.high_priority.uids.clone().unwrap_or_else(|| vec![0, own_uid]);
        Rules { high_uids, high_containers: config.high_priority.containers, admin_uids }
    }

    /// Whether a user may be high priority; `foreign`: it is in a container, whose root may take any number.
    pub fn may_be_high(&self, uid: u32, foreign: bool) -> bool {
        self.high_uids.contains(&uid) && (!foreign || self.high_containers)
    }

    /// The class of a client, and why it is not what it asked for.
    pub fn class(&self, uid: u32, foreign: bool, asked_high: bool) -> (Class, String) {
        match (asked_high, self.may_be_high(uid, foreign)) {
            (false, _) => (Class::BestEffort, String::new()),
            (true, true) => (Class::High, String::new()),
            (true, false) if foreign && !self.high_containers => (
                Class::BestEffort,
                "programs in containers may not register as high priority: set \
                 high_priority.containers = true in the core's configuration"
                    .into(),
            ),
            (true, false) => (
                Class::BestEffort,
                format!(
                    "user {uid} may not register as high priority: add it to high_priority.uids \
                     in the core's configuration"
                ),
            ),
        }
    }

    /// Whether this user, unless it is in a container, may load policies and stop the core.
    pub fn may_change(&self, uid: u32) -> bool {
        self.admin_uids.contains(&uid)
    }

    /// Whether places are kept for this user: root, the core's own, admins, and those that may be high priority.
    pub fn is_trusted(&self, uid: u32) -> bool {
        self.may_change(uid) || self.high_uids.contains(&uid)
    }
}

/// Bound the weight that labels ask for. Whether one asked for more.
pub fn bound_weight(labels: &mut [(String, String)], most: u32) -> bool {
    let mut asked_more = false;
    for (_, value) in labels.iter_mut().filter(|(key, _)| key == "weight") {
        if value.parse::<u32>().is_ok_and(|asked| asked > most) {
            *value = most.to_string();
            asked_more = true;
        }
    }
    asked_more
}

#[cfg(test)]
mod tests {
    use super::*;
    use tally_engine::policy::ClientInfo;

    #[test]
    fn by_default_the_cores_user_and_root_may_all() {
        let rules = Rules::new(&Config::default(), 1000);
        for uid in [0, 1000] {
            assert_eq!(rules.class(uid, false, true), (Class::High, String::new()));
            assert!(rules.may_change(uid));
        }
        let (class, why) = rules.class(1001, false, true);
        assert_eq!(class, Class::BestEffort);
        assert!(why.contains("user 1001") && why.contains("high_priority.uids"), "{why}");
        assert!(!rules.may_change(1001));
        assert_eq!(rules.class(1001, false, false), (Class::BestEffort, String::new()));
    }

    #[test]
    fn a_list_replaces_the_default_for_high_priority_and_adds_for_admin() {
        let config: Config =
            toml::from_str("[high_priority]\nuids = [7]\n[admin]\nuids = [8]\n").unwrap();
        let rules = Rules::new(&config, 1000);
        assert_eq!(rules.class(7, false, true).0, Class::High);
        assert_eq!(rules.class(1000, false, true).0, Class::BestEffort);
        assert!(rules.may_change(8) && rules.may_change(1000));
        assert_eq!(rules.class(7, true, true).0, Class::BestEffort);
        assert!([0, 7, 8, 1000].iter().all(|uid| rules.is_trusted(*uid)) && !rules.is_trusted(9));
    }

    #[test]
    fn a_weight_is_bounded_in_each_label_that_gives_one() {
        let label = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        let of = |labels: &[(String, String)]| {
            let (labels, name) = (labels.to_vec(), String::new());
            ClientInfo { id: 1, class: Class::BestEffort, name, labels }.weight()
        };
        let mut labels = vec![
            label("weight", "0"),
            label("weight", "+1000"),
            label("weight", "7"),
            label("team", "1000"),
        ];
        assert_eq!(of(&labels), 1000);
        assert!(bound_weight(&mut labels, 3));
        assert_eq!((of(&labels), of(&labels[2..])), (3, 3));
        assert_eq!(labels[3].1, "1000");
        assert!(!bound_weight(&mut labels, 3));
    }

    #[test]
    fn root_of_a_container_is_high_priority_only_if_containers_may_be() {
        let rules = Rules::new(&Config::default(), 1000);
        let (class, why) = rules.class(0, true, true);
        assert_eq!(class, Class::BestEffort);
        assert!(why.contains("high_priority.containers"), "{why}");
        let config = toml::from_str("[high_priority]\nuids = [7]\ncontainers = true\n").unwrap();
        let rules = Rules::new(&config, 1000);
        assert_eq!(rules.class(7, true, true), (Class::High, String::new()));
        let (class, why) = rules.class(8, true, true);
        assert_eq!(class, Class::BestEffort);
        assert!(why.contains("user 8") && why.contains("high_priority.uids"), "{why}");
    }
}
