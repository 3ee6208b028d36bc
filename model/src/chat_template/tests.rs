//! Templates in the dialects of the model families that are served, and hostile ones.

use super::*;

fn message(role: &str, content: &str) -> ChatMessage {
    ChatMessage { role: role.into(), content: content.into() }
}

fn render(source: &str, messages: &[ChatMessage]) -> Result<String, String> {
    let template = ChatTemplate::new(source, "<s>", "</s>").map_err(|error| error.to_string())?;
    template.render(messages).map_err(|error| error.to_string())
}

#[test]
fn chatml_with_a_default_system_message() {
    // The template of SmolLM2-Instruct.
    let source = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
        {{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}\
        {% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}\
        {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
    let prompt = render(source, &[message("user", "Hi")]).expect("render");
    let expected = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\
        <|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(prompt, expected);
    let prompt = render(source, &[message("system", "Be <b>brief</b> & \"kind\""), message("user", "Hi")]);
    let expected = "<|im_start|>system\nBe <b>brief</b> & \"kind\"<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n\
        <|im_start|>assistant\n";
    assert_eq!(prompt.expect("render"), expected);
}

#[test]
fn llama_3_dialect() {
    let source = "{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now(\"%Y\") %}
    {%- endif %}
{%- endif %}
{%- if tools is not none %}{{- raise_exception('tools were given') }}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system_message + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
";
    let messages = [message("system", " Be brief. "), message("user", "Hi\n"), message("assistant", "Hello")];
    let expected = "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>\
        <|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>\
        <|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>\
        <|start_header_id|>assistant<|end_header_id|>\n\n";
    assert_eq!(render(source, &messages).expect("render"), expected);
}

const MISTRAL: &str = "{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{% endfor %}";

#[test]
fn mistral_dialect() {
    let messages = [message("user", " Hi "), message("assistant", "Hello"), message("user", "Bye")];
    assert_eq!(render(MISTRAL, &messages).expect("render"), "<s>[INST] Hi [/INST] Hello</s>[INST] Bye [/INST]");
}

#[test]
fn what_a_template_raises_comes_with_its_line() {
    let error = render(MISTRAL, &[message("assistant", "Hello")]).expect_err("roles");
    assert!(error.contains("line 3") && error.contains("roles must alternate"), "{error}");
    let error = render("{{ a }}\n{% if %}", &[]).expect_err("syntax");
    assert!(error.contains("line 2"), "{error}");
    let error = render("\n\n{{ messages[0].role }}", &[]).expect_err("undefined");
    assert!(error.contains("line 3") && error.contains("undefined"), "{error}");
}

#[test]
fn blocks_are_trimmed_and_loops_controlled_as_hugging_face_does() {
    let source = "{% for message in messages %}\n    {% if loop.index > 2 %}\n        {% break %}\n    {% endif %}\n\
        {{ message.content }}\n{% endfor %}\nend{{ missing }}\n";
    let messages = [message("user", "a"), message("user", "b"), message("user", "c")];
    assert_eq!(render(source, &messages).expect("render"), "a\nb\nend");
}

#[test]
fn tojson_is_pythons() {
    let source = r#"{{ {"a": [1, 2.5, none], "b": "<'é\n&\u003c>"} | tojson }} {{ [1] | tojson(indent=2) }}"#;
    let expected = "{\"a\": [1, 2.5, null], \"b\": \"<'é\\n&<>\"} [\n  1\n]";
    assert_eq!(render(source, &[]).expect("render"), expected);
}

#[test]
fn dates_are_formatted_as_python_does() {
    let format = "%d %b %Y|%A %-d %B %y|%H:%M:%S %I %p|%F %T %a%%";
    assert_eq!(
        strftime(format, 1_732_195_805).expect("strftime"),
        "21 Nov 2024|Thursday 21 November 24|13:30:05 01 PM|2024-11-21 13:30:05 Thu%"
    );
    assert_eq!(strftime("%F %a", 951_782_400).expect("strftime"), "2000-02-29 Tue");
    assert_eq!(strftime("%F %a %p", 0).expect("strftime"), "1970-01-01 Thu AM");
    assert!(strftime("%Q", 0).expect_err("unknown").to_string().contains("%Q"));
    assert!(strftime("%", 0).is_err());
}

#[test]
fn hostile_templates_end() {
    let nested = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
    assert!(render(nested, &[]).expect_err("endless").contains("fuel"));
    let flood = "{% for a in range(99999) %}{{ 'xxxxxxxxxx' * 1000 }}{% endfor %}";
    assert!(render(flood, &[]).expect_err("flood").contains("16777216"));
    assert!(render("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", &[]).is_err());
    assert!(render("{% include 'secret' %}", &[]).is_err());
    let deep = format!("{}1{}", "(".repeat(10_000), ")".repeat(10_000));
    assert!(render(&format!("{{{{ {deep} }}}}"), &[]).is_err());
}
