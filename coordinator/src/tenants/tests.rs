use std::time::Duration;

use super::{tenant::TenantUse, *};

pub(super) fn text(tenants: &[(&str, &str, &str)]) -> String {
    let one = |(name, key, rest): &(&str, &str, &str)| {
        format!("[[tenant]]\nname = \"{name}\"\nkey_sha256 = [\"{}\"]\n{rest}\n", KeyHash::of(key.as_bytes()))
    };
    tenants.iter().map(one).collect()
}

pub(super) fn tenants(text: &str) -> Tenants {
    let table = Table::of(file::parse(text).unwrap(), &BTreeMap::new());
    Tenants::with(table)
}

fn name(tenants: &Tenants, authorization: &str) -> Option<String> {
    Some(tenants.authenticate(Some(authorization.as_bytes())).ok()?.name().to_string())
}

#[test]
fn without_a_file_everybody_is_the_default() {
    let tenants = Tenants::open(None).unwrap();
    let tenant = tenants.authenticate(None).unwrap();
    assert_eq!((&**tenant.name(), tenant.is_admin(), tenants.is_open()), (DEFAULT, true, true));
    assert_eq!(tenants.share(&tenant, 10), 10);
}

#[test]
fn a_key_says_whose_a_request_is() {
    let tenants = tenants(&text(&[("a", "first", ""), ("b", "second", "weight = 3\nadmin = true")]));
    assert_eq!(name(&tenants, "Bearer first").as_deref(), Some("a"));
    assert_eq!(name(&tenants, "bearer second").as_deref(), Some("b"));
    assert!(matches!(tenants.authenticate(None), Err(RequestError::NoKey)));
    assert!(matches!(tenants.authenticate(Some(b"Basic first")), Err(RequestError::NoKey)));
    for wrong in ["Bearer firs", "Bearer first1", "Bearer Second"] {
        assert!(matches!(tenants.authenticate(Some(wrong.as_bytes())), Err(RequestError::UnknownKey)), "{wrong}");
    }
    let shares: Vec<_> = tenants.all().iter().map(|tenant| tenants.share(tenant, 8)).collect();
    assert_eq!(shares, [2, 6]);
}

#[test]
fn limits_hold_and_give_back() {
    let limits = "max_concurrent = 2\ntokens_per_minute = 600\ntoken_budget = 1000";
    let tenants = tenants(&text(&[("a", "k", limits)]));
    let tenant = tenants.authenticate(Some(b"Bearer k")).unwrap();
    let (mut first, second) = (tenant.enter().unwrap(), tenant.enter().unwrap());
    assert!(matches!(tenant.enter(), Err(RequestError::TenantBusy { limit: 2 })));
    first.reserve(500).unwrap();
    drop(second);
    let mut third = tenant.enter().unwrap();
    let refused = third.reserve(200).unwrap_err();
    let wait = refused.retry_after().unwrap().as_secs_f64();
    assert!((9.0..=10.0).contains(&wait), "{refused}");
    // What the refused one had set aside of the budget goes with it.
    drop(third);
    assert_eq!(tenant.in_use().budget_left, Some(500));
    first.count(100);
    drop(first);
    assert_eq!(tenant.in_use(), TenantUse { num_running: 0, budget_left: Some(900) });
}

#[test]
fn a_budget_that_is_not_renewed_gives_no_hint() {
    let tenants = tenants(&text(&[("a", "k", "token_budget = 1000")]));
    let tenant = tenants.authenticate(Some(b"Bearer k")).unwrap();
    let mut entry = tenant.enter().unwrap();
    let refused = entry.reserve(1001).unwrap_err();
    assert!(matches!(refused, RequestError::TokenBudget { needed: 1001, left: 1000, .. }), "{refused}");
    assert_eq!(refused.retry_after(), None);
    entry.reserve(1000).unwrap();
}

#[tokio::test]
async fn a_changed_file_is_taken_over_and_a_bad_one_is_not() {
    let folder = std::env::temp_dir().join(format!("lockstep-tenants-{}", uuid::Uuid::new_v4()));
    std::fs::create_dir(&folder).unwrap();
    let path = folder.join("tenants.toml");
    std::fs::write(&path, text(&[("a", "first", ""), ("b", "second", "")])).unwrap();
    let tenants = Tenants::open(Some(&path)).unwrap();
    let running = tenants.authenticate(Some(b"Bearer second")).unwrap().enter().unwrap();
    // A change before the first look.
    std::fs::write(&path, text(&[("a", "early", ""), ("b", "second", "")])).unwrap();
    let follow = tokio::spawn(tenants.clone().follow(path.clone()));
    let until = async |what: &str, condition: &dyn Fn() -> bool| {
        for _ in 0..500 {
            if condition() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("{what} did not happen");
    };
    until("the first look", &|| name(&tenants, "Bearer early").as_deref() == Some("a")).await;
    assert!(name(&tenants, "Bearer first").is_none());
    std::fs::write(&path, "[[tenant]]\nname = 1").unwrap();
    until("the refusal", &|| !tenants.is_file_valid()).await;
    assert_eq!(name(&tenants, "Bearer early").as_deref(), Some("a"));
    std::fs::write(&path, text(&[("b", "third", "max_concurrent = 1")])).unwrap();
    until("the change", &|| name(&tenants, "Bearer third").as_deref() == Some("b")).await;
    assert!(
        tenants.is_file_valid()
            && name(&tenants, "Bearer early").is_none()
            && name(&tenants, "Bearer second").is_none()
    );
    // What runs is counted on.
    let same = tenants.authenticate(Some(b"Bearer third")).unwrap();
    assert!(matches!(same.enter(), Err(RequestError::TenantBusy { limit: 1 })));
    drop(running);
    assert!(same.enter().is_ok());
    follow.abort();
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(matches!(Tenants::open(Some(&path)), Err(CoordinatorError::TenantsFile { .. })));
}
