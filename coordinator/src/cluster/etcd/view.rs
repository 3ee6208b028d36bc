//! What was read from etcd. Plain state.
//! Invariant: a key is never set back to an older revision, and a value that cannot be read leaves the last one in force.

use std::{collections::BTreeMap, sync::Arc};

use lockstep_etcd::{
    etcd_client::{Event, EventType, KeyValue},
    keys::Keys,
};
use lockstep_proto::{Message, v1};

use crate::cluster::{
    registration::check_hello,
    store::{StoreState, Versioned},
};

/// Registered workers by id.
pub type Entries = Arc<BTreeMap<String, v1::WorkerEntry>>;

/// Replaces everything by what a list brought.
pub fn list(keys: &Keys, found: &[KeyValue], state: &mut StoreState, entries: &mut Entries) {
    let is_there = |key: &str| found.iter().any(|kv| kv.key() == key.as_bytes());
    if !is_there(&keys.desired()) {
        state.desired = Versioned::default();
    }
    if !is_there(&keys.plan()) {
        state.plan = Versioned::default();
    }
    if !is_there(&keys.leader()) {
        state.leader = None;
    }
    let gone: Vec<String> = entries.keys().filter(|id| !is_there(&keys.worker(id))).cloned().collect();
    for worker_id in gone {
        Arc::make_mut(entries).remove(&worker_id);
    }
    for kv in found {
        put(keys, kv, state, entries);
    }
    state.is_read = true;
}

/// Follows one change.
pub fn follow(keys: &Keys, event: &Event, state: &mut StoreState, entries: &mut Entries) {
    let Some(kv) = event.kv() else { return };
    match event.event_type() {
        EventType::Put => put(keys, kv, state, entries),
        EventType::Delete => {
            let Ok(key) = kv.key_str() else { return };
            if let Some(worker_id) = keys.worker_of(key) {
                Arc::make_mut(entries).remove(worker_id);
            } else if key == keys.leader() {
                state.leader = None;
            } else if key == keys.desired() && kv.mod_revision() > state.desired.revision {
                state.desired = Versioned::default();
            } else if key == keys.plan() && kv.mod_revision() > state.plan.revision {
                state.plan = Versioned::default();
            }
        }
    }
}

fn put(keys: &Keys, kv: &KeyValue, state: &mut StoreState, entries: &mut Entries) {
    let Ok(key) = kv.key_str() else { return };
    if let Some(worker_id) = keys.worker_of(key) {
        if let Some(entry) = worker(worker_id, kv.value()) {
            Arc::make_mut(entries).insert(worker_id.to_owned(), entry);
        }
    } else if key == keys.leader() {
        state.leader = kv.value_str().ok().map(str::to_owned);
    } else if key == keys.desired() {
        set(key, kv, &mut state.desired);
    } else if key == keys.plan() {
        set(key, kv, &mut state.plan);
    }
}

fn set<T: Message + Default>(key: &str, kv: &KeyValue, versioned: &mut Versioned<T>) {
    if kv.mod_revision() <= versioned.revision {
        return;
    }
    match T::decode(kv.value()) {
        Ok(value) => *versioned = Versioned { value: Arc::new(value), revision: kv.mod_revision() },
        Err(error) => tracing::error!(key, %error, "a value in etcd cannot be read"),
    }
}

fn worker(worker_id: &str, value: &[u8]) -> Option<v1::WorkerEntry> {
    let refuse = |problem: &dyn std::fmt::Display| {
        tracing::error!(worker_id, %problem, "a registration in etcd is not usable");
    };
    let entry = v1::WorkerEntry::decode(value).inspect_err(|error| refuse(error)).ok()?;
    let Some(hello) = entry.hello.as_ref().filter(|hello| hello.worker_id == worker_id) else {
        refuse(&"it is of another worker");
        return None;
    };
    check_hello(hello).inspect_err(|status| refuse(&status.message())).ok()?;
    Some(entry)
}
